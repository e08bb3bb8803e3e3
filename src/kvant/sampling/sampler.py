"""Chooses tokens from logits on the host, many rows at a time; no row's result depends on other rows.

A token depends on its logits, its request's seed and its place in the answer, not on the batch or on
preemption. A row behind drafts gives the token that would be chosen there without them.

The device chooses by itself where a request has neither rules nor log-probabilities; this module is for
the other requests, and for devices without recorded steps.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.errors import RequestError
from kvant.sampling.drawing import Draw, draw, to_device
from kvant.sampling.logit_rules import Edits, LogitRules, edited, nothing_left
from kvant.sampling.logprobs import TokenLogprobs
from kvant.sampling.random_numbers import uniform
from kvant.sampling.sampling_params import SamplingParams

_LOGPROB_ROWS = 8
"""Rows whose log-probabilities are computed at once: the working memory is three of these in float64."""

_LOGPROB_BYTES = 256 * 2**20
"""Working memory of prompt_logprobs: a row of logits is held as the model made it and in float32."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One row's token; None where there is none to choose.

    error: the request's own rules leave no token. Without an error the logits hold NaN or +Inf, or
    nothing but -Inf.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A row of logits from which a token may be chosen.

    place: the token's place in the answer, 0 for the first. num_drafts: drafts before it, which may be
    rejected; the rules do not know them yet.
    """

    row: int
    params: SamplingParams
    rules: LogitRules | None
    seed: int
    place: int
    num_drafts: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it takes the most likely token and asks nothing else."""
        return self.params.is_greedy and self.rules is None and self.params.logprobs is None


def greedy(logits: Tensor) -> tuple[list[bool], list[int]]:
    """Whether the largest logit of each row [n, vocab_size] is finite, and its index."""
    best, argmax = logits.max(dim=-1)  # NaN and +Inf anywhere in a row become its maximum
    return torch.isfinite(best).tolist(), argmax.tolist()


class RowSampler:
    """Chooses tokens from rows of logits [n, vocab_size].

    sound, likeliest: `greedy` of all rows. Rows without rules, and rows before all drafts, are sampled
    together at once; a row with rules behind drafts waits until these are accepted.
    """

    def __init__(
        self,
        logits: Tensor,
        wanted: Items[RowRequest],
        sound: Items[bool],
        likeliest: Items[int],
    ) -> None:
        self._logits = logits
        self._sound, self._likeliest = sound, likeliest
        self._wanted = {one.row: one for one in wanted}
        together = [
            one
            for one in wanted
            if sound[one.row] and not one.is_plain and (one.rules is None or not one.num_drafts)
        ]
        self._found: dict[int, Sampled] = {}
        if together:
            found = _sample_together(logits, together, likeliest)
            self._found = {one.row: sampled for one, sampled in zip(together, found, strict=True)}

    def sample(self, row: int) -> Sampled:
        """The row's token. The drafts before it have been accepted."""
        if not self._sound[row]:
            return Sampled(None)
        wanted = self._wanted[row]
        if wanted.is_plain:
            return Sampled(self._likeliest[row])
        found = self._found.get(row)
        if found is None:
            (found,) = _sample_together(self._logits, [wanted], self._likeliest)
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
    logits: Tensor, wanted: Items[RowRequest], likeliest: Items[int]
) -> list[Sampled]:
    """A token for each of some rows whose logits are finite. likeliest: of every row of logits."""
    errors: dict[int, RequestError] = {}
    edits: dict[int, Edits] = {}
    for place, one in enumerate(wanted):
        if one.rules is not None:
            try:
                edits[place] = one.rules.edits(logits.shape[1])
            except RequestError as fault:
                errors[place] = fault
    tokens = [likeliest[one.row] for one in wanted]
    changed = logits
    if edits:
        rows = _rows_of(logits, [wanted[place].row for place in edits])
        changed = edited(rows, [*edits.values()])
        sound, best = greedy(changed)
        for (place, edit), is_sound, token in zip(edits.items(), sound, best, strict=True):
            tokens[place] = token
            if not is_sound:
                errors[place] = nothing_left(edit)
    drawn = [
        place
        for place, one in enumerate(wanted)
        if not one.params.is_greedy and place not in errors
    ]
    edited_rows = {place: row for row, place in enumerate(edits)}
    for source, at in (
        (logits, {place: wanted[place].row for place in drawn if place not in edits}),
        (changed, {place: edited_rows[place] for place in drawn if place in edits}),
    ):
        draws = [
            Draw(wanted[place].params, uniform(wanted[place].seed, wanted[place].place))
            for place in at
        ]
        for place, token in zip(at, draw(source, [*at.values()], draws), strict=True):
            tokens[place] = token
    logprobs = _logprobs(logits, wanted, tokens, errors)
    return [
        Sampled(None, error=errors[place])
        if place in errors
        else Sampled(token, logprobs.get(place))
        for place, token in enumerate(tokens)
    ]


def _logprobs(
    logits: Tensor, wanted: Items[RowRequest], tokens: Items[int], errors: Collection[int]
) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows that ask for them, by place in `wanted`."""
    asking: dict[int, list[int]] = {}
    for place, one in enumerate(wanted):
        if one.params.logprobs is not None and place not in errors:
            asking.setdefault(one.params.logprobs, []).append(place)
    found: dict[int, TokenLogprobs] = {}
    for num_top, places in asking.items():
        rows = _rows_of(logits, [wanted[place].row for place in places])
        size = 1 if logits.device.type == "cpu" else _LOGPROB_ROWS
        for start in range(0, len(places), size):
            # Always the same number of rows, the last one repeated: sums do not depend on the batch.
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
