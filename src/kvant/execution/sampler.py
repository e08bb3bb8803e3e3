"""From logits to tokens, many rows at a time: no row's result depends on the rows beside it.

The only randomness is one number for each new token, a hash of the request's seed and the token's place
in the answer. So a token depends on its logits, its seed and its place alone: not on the batch, on
preemption, or on what was drawn for others. Nor on how its row came about: a row that lies some draft
tokens beyond the answer gives the token that would be chosen there without a draft.

Rows of one step are edited and drawn from together, where their requests' rules are known: always, but
for rows behind drafts of requests with rules, whose turn comes when those drafts stand.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.errors import RequestError
from kvant.sampling.drawing import Draw, draw, to_device, uniform
from kvant.sampling.logit_rules import Edits, edited, nothing_left
from kvant.scheduling.request import Sequence, TokenLogprobs

_LOGPROB_ROWS = 8
"""Rows whose log-probabilities are computed at once: the working memory is three of these in float64."""

_LOGPROB_BYTES = 256 * 2**20
"""Working memory of prompt_logprobs: a row of logits is held as the model made it and in float32."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token; None where there is none to choose.

    error: the request's own rules leave no token. Without it the logits are no numbers to choose from
    (NaN, +Inf, all -Inf).
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


Greedy = tuple[list[bool], list[int]]
"""For each row of logits: whether its largest is a finite number, and where that stands."""


def greedy(logits: Tensor) -> Greedy:
    """Of rows of logits [n, vocab]."""
    best, argmax = logits.max(dim=-1)  # NaN and +Inf anywhere in a row become its maximum
    return torch.isfinite(best).tolist(), argmax.tolist()


class Rows:
    """Rows of logits, [n, vocab], each to be sampled for its own sequence when its turn comes.

    wanted: rows whose turn may come, whose they are, and how many drafts stand before them.
    known: what `greedy` says of all rows, where somebody knows it already; `sound` and `likeliest`
    afterwards. is_final: what is known are everybody's own tokens, drawn ones too.
    """

    def __init__(
        self,
        logits: Tensor,
        wanted: Items[tuple[int, Sequence, int]],
        known: Greedy | None = None,
        *,
        is_final: bool = False,
    ) -> None:
        self._logits = logits
        self.is_final = is_final
        self.sound, self.likeliest = known or greedy(logits)
        together = [
            (row, sequence, ahead)
            for row, sequence, ahead in wanted
            if self.sound[row] and not sequence.is_plain and (sequence.rules is None or not ahead)
        ]
        self._found: dict[int, Sampled] = {}
        if together:
            index, sequences, aheads = zip(*together, strict=True)
            found = _sample_together(logits, index, sequences, aheads, self.likeliest)
            self._found = dict(zip(index, found, strict=True))

    def sample(self, row: int, sequence: Sequence) -> Sampled:
        """The token that follows what the sequence has now."""
        if not self.sound[row]:
            return Sampled(None)
        if self.is_final or sequence.is_plain:
            return Sampled(self.likeliest[row])
        found = self._found.get(row)
        if found is None:  # behind drafts, which stand: its rules are known now
            (found,) = _sample_together(self._logits, [row], [sequence], [0], self.likeliest)
        return found


def max_prompt_logprobs(vocab_size: int) -> int:
    """Prompt tokens of one step that can have log-probabilities in 256 MiB of working memory."""
    left = _LOGPROB_BYTES - _LOGPROB_ROWS * 3 * 8 * vocab_size
    return max(1, left // (8 * vocab_size))


def token_logprobs(rows: Tensor, tokens: Items[int], num_top: int) -> list[TokenLogprobs]:
    """What rows of logits [n, vocab] say of n tokens, and of the `num_top` likeliest of each row.

    In float64, a few rows at a time.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _LOGPROB_ROWS):
        part = rows[start : start + _LOGPROB_ROWS].to(torch.float64)
        wanted = torch.tensor(tokens[start : start + _LOGPROB_ROWS], device=rows.device)[:, None]
        own = part.gather(1, wanted)
        ranks = (part > own).sum(1) + 1
        norms = part.logsumexp(1, keepdim=True)
        values, ids = part.topk(min(num_top, part.shape[1]))
        found += [
            TokenLogprobs(token, logprob, rank, tuple(zip(top, logprobs, strict=True)))
            for token, logprob, rank, top, logprobs in zip(
                wanted[:, 0].tolist(),
                (own - norms)[:, 0].tolist(),
                ranks.tolist(),
                ids.tolist(),
                (values - norms).tolist(),
                strict=True,
            )
        ]
    return found


def _sample_together(
    logits: Tensor,
    index: Items[int],
    sequences: Items[Sequence],
    aheads: Items[int],
    likeliest: Items[int],
) -> list[Sampled]:
    """A token for each of some sound rows of logits. likeliest: of every row."""
    count = len(index)
    errors: dict[int, RequestError] = {}
    edits: dict[int, Edits] = {}
    for place, sequence in enumerate(sequences):
        if sequence.rules is not None:
            try:
                edits[place] = sequence.rules.edits(logits.shape[1])
            except RequestError as fault:
                errors[place] = fault
    tokens = [likeliest[row] for row in index]
    changed = logits
    if edits:
        changed = edited(_rows_of(logits, [index[place] for place in edits]), [*edits.values()])
        sound, best = greedy(changed)
        for (place, edit), is_sound, token in zip(edits.items(), sound, best, strict=True):
            tokens[place] = token
            if not is_sound:
                errors[place] = nothing_left(edit)
    drawn = [
        place
        for place, sequence in enumerate(sequences)
        if not sequence.request.params.is_greedy and place not in errors
    ]
    edited_rows = {place: row for row, place in enumerate(edits)}
    for rows, at in (
        (logits, {place: index[place] for place in drawn if place not in edits}),
        (changed, {place: edited_rows[place] for place in drawn if place in edits}),
    ):
        draws = [_draw_of(sequences[place], aheads[place]) for place in at]
        for place, token in zip(at, draw(rows, [*at.values()], draws), strict=True):
            tokens[place] = token
    logprobs = _logprobs(logits, index, sequences, tokens, errors)
    return [
        Sampled(None, error=errors[place])
        if place in errors
        else Sampled(tokens[place], logprobs.get(place))
        for place in range(count)
    ]


def _draw_of(sequence: Sequence, ahead: int) -> Draw:
    request = sequence.request
    return Draw(request.params, uniform(request.seed, sequence.num_output_tokens + ahead))


def _logprobs(
    logits: Tensor,
    index: Items[int],
    sequences: Items[Sequence],
    tokens: Items[int],
    errors: Collection[int],
) -> dict[int, TokenLogprobs]:
    """Of those that ask for them, by their number of likeliest tokens."""
    asking: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        num_top = sequence.request.params.logprobs
        if num_top is not None and place not in errors:
            asking.setdefault(num_top, []).append(place)
    found: dict[int, TokenLogprobs] = {}
    for num_top, places in asking.items():
        rows = _rows_of(logits, [index[place] for place in places])
        size = 1 if logits.device.type == "cpu" else _LOGPROB_ROWS
        for start in range(0, len(places), size):
            # Always as many rows, the last one again: see `kvant.sampling.drawing`.
            some = places[start : start + size]
            short = size - len(some)
            part = rows[start : start + size]
            if short:
                part = torch.cat([part, part[-1:].expand(short, -1)])
            chosen = [tokens[place] for place in some]
            listed = token_logprobs(part, chosen + chosen[-1:] * short, num_top)
            found |= dict(zip(some, listed, strict=False))
    return found


def _rows_of(logits: Tensor, index: Items[int]) -> Tensor:
    """Some rows, as a view where they are all of them in order."""
    if list(index) == list(range(len(logits))):
        return logits
    return logits[to_device(torch.tensor(index), logits.device)]
