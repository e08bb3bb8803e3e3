"""Chooses tokens from logits, many rows at a time; no row's result depends on other rows.

A token depends on its logits, its request's seed and its place in the answer, not on the batch or on
preemption. A row after drafts gives the token that would be chosen there without drafts.

Sampling uses a counter-based random number u, a hash of the seed and the place, so a step can be launched
before the step before it is read. The tokens that the filters keep are ordered by id. The sampled token is
the first one whose cumulative probability exceeds u. Libraries may sum in another order for another number
of rows. So GPU kernels treat each row alone (`kvant.sampling.triton_draw`), and a CPU samples row by row.

Recorded steps sample with `Drawer`. `RowSampler` is for requests with rules or log-probabilities, and for
devices without recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from struct import Struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvant.errors import RequestError
from kvant.kernels.transfer import to_device
from kvant.sampling.logit_rules import Edits, LogitRules, edited, nothing_left
from kvant.sampling.logprobs import TokenLogprobs
from kvant.sampling.sampling_params import SamplingParams

_LOGPROB_ROWS = 8
"""Rows whose log-probabilities are computed at once. Working memory: three copies of them in float64."""

_LOGPROB_BYTES = 256 * 2**20
"""Bytes of working memory of prompt_logprobs, which holds logits in the model's dtype and in float32."""

HEAD = 1024
"""Number of likeliest tokens sorted first. A flat distribution or a large top_k needs the whole row."""

FEW = 64
"""Number of likeliest tokens sorted first for a smaller top_k. GPU kernels then never search a whole row."""

_two_words = Struct("<qq").pack


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen in one row, or None if none can be chosen.

    error: why the request's own rules leave no token. None without an error means that the logits hold NaN
    or +Inf, or only -Inf. hidden: the row itself, if it is a hidden state.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A row of logits to choose a token from. row: its index in the step's logits.

    place: the token's place in the answer, 0 for the first. num_drafts: drafts before it in this step, which
    may be rejected and which the rules have not seen yet.
    """

    row: int
    params: SamplingParams
    rules: LogitRules | None
    seed: int
    place: int
    num_drafts: int = 0

    @property
    def is_plain(self) -> bool:
        """True if the token is the most likely one: greedy, without rules or log-probabilities."""
        return self.params.is_greedy and self.rules is None and self.params.logprobs is None


def greedy(logits: Tensor) -> tuple[list[bool], list[int]]:
    """Returns whether each row's largest logit is finite, and its index.

    logits: [n, vocab_size] of any floating dtype.
    """
    best, argmax = logits.max(dim=-1)  # NaN and +Inf anywhere in a row become its maximum
    return torch.isfinite(best).tolist(), argmax.tolist()


class RowSampler:
    """Chooses tokens from rows of logits [n, vocab_size].

    sound, likeliest: the result of `greedy` for all rows. Rows without rules and rows before all drafts are
    sampled together in the constructor. A row with rules after drafts is sampled when `sample` asks for it.
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
        """Returns the row's token. Call only after the drafts before this row have been accepted."""
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
    """Returns the most prompt tokens per step that can be scored within _LOGPROB_BYTES."""
    left = _LOGPROB_BYTES - _LOGPROB_ROWS * 3 * 8 * vocab_size
    return max(1, left // (8 * vocab_size))


def token_logprobs(rows: Tensor, tokens: Items[int], num_top: int) -> list[TokenLogprobs]:
    """Returns log-probabilities of n tokens, and of the `num_top` likeliest tokens of each row.

    rows: logits [n, vocab]. tokens: n ids, one per row. Computes in float64, a few rows at a time.
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
    """Chooses a token in each wanted row; their logits must be finite. likeliest: each row's argmax."""
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
    """Returns log-probabilities of the rows that request them, by index in `wanted`."""
    asking: dict[int, list[int]] = {}
    for place, one in enumerate(wanted):
        if one.params.logprobs is not None and place not in errors:
            asking.setdefault(one.params.logprobs, []).append(place)
    found: dict[int, TokenLogprobs] = {}
    for num_top, places in asking.items():
        rows = _rows_of(logits, [wanted[place].row for place in places])
        size = 1 if logits.device.type == "cpu" else _LOGPROB_ROWS
        for start in range(0, len(places), size):
            # Pad to a fixed number of rows by repeating the last, so that sums do not depend on the batch.
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
    """Returns the rows at `index`; `logits` itself if these are all rows in order."""
    if list(index) == list(range(len(logits))):
        return logits
    return logits[to_device(torch.tensor(index), logits.device)]


# -- drawing ----------------------------------------------------------------------------------


def uniform(seed: int, place: int) -> float:
    """Returns the random number in [0, 1), with 53 bits, for one seed and one place in the answer."""
    return float(uniforms([seed], [place])[0])


def uniforms(seeds: Items[int], places: Items[int]) -> NDArray[np.float64]:
    """Returns [n] float64, `uniform` of each pair of a seed and a place."""
    digests = [
        blake2b(_two_words(seed, place), digest_size=8).digest()
        for seed, place in zip(seeds, places, strict=True)
    ]
    found: NDArray[np.float64] = (np.frombuffer(b"".join(digests), "<u8") >> 11) / 2**53
    return found


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled. u: its random number in [0, 1)."""

    params: SamplingParams
    u: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """`SamplingParams.numbers`, then u."""
        return *self.params.numbers, self.u


@dataclass(frozen=True, slots=True)
class DrawParts:
    """The parts of sampling, each of which can be recorded. Parts that some row needs run in this order.

    few: samples rows whose filters keep few tokens. by_count, by_share: find the smallest logit that top_k,
    then top_p, keeps in the other rows. choose: samples these rows.
    """

    few: Callable[[], None]
    by_count: Callable[[], None]
    by_share: Callable[[], None]
    choose: Callable[[], None]

    def of(self, needed: Items[bool]) -> list[Callable[[], None]]:
        """Returns the parts to run. needed: the result of `parts_for`."""
        parts = self.few, self.by_count, self.by_share, self.choose
        return [part for part, is_needed in zip(parts, needed, strict=True) if is_needed]


class Drawer:
    """Samples from up to `most` rows of logits at a time, without waiting for the device."""

    def __init__(self, most: int, vocab_size: int, device: torch.device) -> None:
        self._space = None
        if has_kernels(device):
            from kvant.sampling.triton_draw import make_space

            self._space = make_space(most, vocab_size, device)

    def parts(self, logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor) -> DrawParts:
        """Returns the parts that sample from some rows of logits [.., vocab] in float32 or wider.

        rows: [n] int64, indices of rows. numbers: [n, 5] float64, `Draw.numbers` of each. tokens: [n] int64,
        each row's most likely token, overwritten with the sampled one. A row with temperature 0, or whose
        largest logit is not finite, keeps its token.
        """
        given = logits, rows, numbers, tokens
        if self._space is None:
            few, others = (
                partial(_draw_each, *given, is_open=is_open) for is_open in (False, True)
            )
            return DrawParts(few, _nothing, _nothing, others)
        from kvant.sampling.triton_draw import choose, draw_from_few, narrow

        return DrawParts(
            partial(draw_from_few, *given, self._space),
            partial(narrow, *given, self._space, by_share=False),
            partial(narrow, *given, self._space, by_share=True),
            partial(choose, *given, self._space),
        )


def draw(logits: Tensor, index: Items[int], draws: Items[Draw]) -> list[int]:
    """Samples a token in each row `index` of logits [n, vocab], float32 or float64.

    Each row's largest logit must be finite.
    """
    if not draws:
        return []
    table = torch.tensor([one.numbers for one in draws], dtype=torch.float64)
    rows = to_device(torch.tensor(index), logits.device)
    # Computed here, because rows with rules have another argmax than the host knows.
    tokens = logits.argmax(-1)[rows]
    drawer = Drawer(len(draws), logits.shape[1], logits.device)
    parts = drawer.parts(logits, rows, to_device(table, logits.device), tokens)
    for run in parts.of(parts_for(table)):
        run()
    found: list[int] = tokens.tolist()
    return found


def parts_for(numbers: Tensor) -> list[bool]:
    """Returns which `DrawParts` these rows need. numbers: [n, 3 or more] float64 on the host, as in
    `Draw.numbers`."""
    temperature, top_k, top_p = numbers[:, 0], numbers[:, 1], numbers[:, 2]
    has_k, has_p = top_k < torch.inf, top_p < 1
    is_open = (temperature > 0) & (top_k > FEW)
    needed = has_k | has_p, is_open & has_k, is_open & has_p, is_open
    return [bool(rows.any()) for rows in needed]


def has_kernels(device: torch.device) -> bool:
    """Returns whether Triton's kernels run on the device."""
    return device.type != "cpu"


def _nothing() -> None: ...


def _draw_each(
    logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor, *, is_open: bool
) -> None:
    """Samples row by row on a CPU. is_open: rows with top_k above FEW, or without it; else the others."""
    for place, (row, wish) in enumerate(zip(rows.tolist(), numbers.tolist(), strict=True)):
        if is_open != (wish[1] > FEW):
            continue
        x = logits[row]
        best = x[tokens[place]]
        if wish[0] > 0 and bool(torch.isfinite(best)):
            tokens[place] = _draw_row(x, best, *wish)


def _draw_row(
    x: Tensor, best: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, u: float
) -> Tensor:
    """Samples a token from one row of logits [vocab] whose largest is `best`."""
    ids = None
    if top_k < torch.inf or top_p < 1 or min_p > 0:
        for size in (*((FEW,) if top_k < FEW else ()), HEAD, len(x)):
            ids = _kept(x, best, temperature, top_k, top_p, min_p, min(size, len(x)))
            if ids is not None:
                break
    mass = _weights(x if ids is None else x[ids], best, temperature).cumsum(0)
    place = torch.searchsorted(mass, u * mass[-1], right=True).clamp_(max=len(mass) - 1)
    return place if ids is None else ids[place]


def _kept(
    x: Tensor,
    best: Tensor,
    temperature: float,
    top_k: float,
    top_p: float,
    min_p: float,
    size: int,
) -> Tensor | None:
    """Returns the ids that the filters keep, ascending; None if the `size` likeliest do not determine them.

    Each filter keeps a prefix of the tokens, ordered by probability and, among equals, by id. So the
    shortest prefix is the result. A `size` of the whole row always suffices.
    """
    is_all = size == len(x)
    ids = torch.arange(size) if is_all else x.topk(size).indices.sort().values
    values, order = _weights(x[ids], best, temperature).sort(descending=True, stable=True)
    # Tokens as unlikely as the last one do not count, because others of equal probability may be missing.
    known = size if is_all else int((values > values[-1]).sum())
    likely = int((values[:known] >= min_p * values[0]).sum())
    kept = int(min(likely, top_k))
    is_settled = is_all or likely < known or top_k <= likely
    if not is_settled and (top_p >= 1 or min_p > 0 or top_k < torch.inf):
        return None
    if top_p < 1:
        mass = values[:kept].cumsum(0)
        # With top_p alone the total is over all tokens. The head suffices if it reaches the share.
        total = mass[-1] if is_settled else _weights(x, best, temperature).cumsum(0)[-1]
        needed = int((mass < top_p * total).sum()) + 1
        if needed > kept:
            return None
        kept = needed
    return ids[order[:kept]].sort().values


def _weights(x: Tensor, best: Tensor, temperature: float) -> Tensor:
    """Returns exp((x - best) / temperature) in float64."""
    wide = x.to(torch.float64)
    return ((wide - best.to(torch.float64)) / temperature).exp_()
