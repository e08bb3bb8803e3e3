"""Samples tokens from many rows of logits; no row's token depends on other rows.

A token has one random number u (`kvant.sampling.random_numbers`). The tokens that the filters keep are
ordered by id; the sampled token is the first one whose cumulative probability exceeds u.

A library may sum in another order for another number of rows. So a GPU's kernels treat each row alone
(`kvant.sampling.triton_draw`), and a CPU samples one row after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvant.sampling.random_numbers import wishes
from kvant.sampling.sampling_params import SamplingParams

HEAD = 1024
"""Most likely tokens that are sorted first; a flat distribution or a large top_k needs the whole row."""

FEW = 64
"""The same for a top_k below this. A GPU's kernels never search a whole row for its edge."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled. u: its random number in [0, 1)."""

    params: SamplingParams
    u: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """`wishes`, then u."""
        return *wishes(self.params), self.u


@dataclass(frozen=True, slots=True)
class DrawParts:
    """Sampling in parts that can be recorded; the parts that some row needs run in this order.

    few: sample rows whose filters keep few tokens. by_count, by_share: find what top_k, then top_p,
    keeps in the other rows. choose: sample these.
    """

    few: Callable[[], None]
    by_count: Callable[[], None]
    by_share: Callable[[], None]
    choose: Callable[[], None]

    def of(self, needed: Items[bool]) -> list[Callable[[], None]]:
        """needed: as `parts_for`."""
        parts = self.few, self.by_count, self.by_share, self.choose
        return [part for part, is_needed in zip(parts, needed, strict=True) if is_needed]


class Drawer:
    """Draws from up to `most` rows of logits at a time, without waiting for the device."""

    def __init__(self, most: int, vocab_size: int, device: torch.device) -> None:
        self._space = None
        if has_kernels(device):
            from kvant.sampling.triton_draw import make_space

            self._space = make_space(most, vocab_size, device)

    def parts(self, logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor) -> DrawParts:
        """Sampling of rows [n] int64 of logits [.., vocab] float32 or wider.

        numbers: [n, 5] float64, `Draw.numbers` of each row. tokens: [n] int64, the most likely token of
        each row, overwritten with the sampled one; a row with temperature 0, or whose largest logit is
        not finite, keeps it.
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
    """A token of each of some rows of logits [n, vocab] whose largest is a finite number."""
    if not draws:
        return []
    table = torch.tensor([one.numbers for one in draws], dtype=torch.float64)
    rows = to_device(torch.tensor(index), logits.device)
    # The device's own: what the host knows of it came from there too, but not for rows with rules.
    tokens = logits.argmax(-1)[rows]
    drawer = Drawer(len(draws), logits.shape[1], logits.device)
    parts = drawer.parts(logits, rows, to_device(table, logits.device), tokens)
    for run in parts.of(parts_for(table)):
        run()
    found: list[int] = tokens.tolist()
    return found


def parts_for(numbers: Tensor) -> list[bool]:
    """Which parts of a draw these `Draw.numbers` [n, 5], on the host, need: for `DrawParts.of`."""
    temperature, top_k, top_p = numbers[:, 0], numbers[:, 1], numbers[:, 2]
    has_k, has_p = top_k < torch.inf, top_p < 1
    is_open = (temperature > 0) & (top_k > FEW)
    needed = has_k | has_p, is_open & has_k, is_open & has_p, is_open
    return [bool(rows.any()) for rows in needed]


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return device.type != "cpu"


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor [n, ..] to the device without waiting for running work."""
    if device.type == "cpu" or not len(numbers):
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def _nothing() -> None: ...


def _draw_each(
    logits: Tensor, rows: Tensor, numbers: Tensor, tokens: Tensor, *, is_open: bool
) -> None:
    """The first or the last of `Drawer.parts` on a CPU."""
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
    """A token of one row [vocab] whose largest is `best`."""
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
    """Tokens that the filters leave, in order, if the `size` likeliest tell; all of them always do.

    Each filter keeps a beginning of the tokens, likeliest first, smaller ids first among equals, so the
    shortest one decides.
    """
    is_all = size == len(x)
    ids = torch.arange(size) if is_all else x.topk(size).indices.sort().values
    values, order = _weights(x[ids], best, temperature).sort(descending=True, stable=True)
    # Those as unlikely as the last do not count: their equals may be missing.
    known = size if is_all else int((values > values[-1]).sum())
    likely = int((values[:known] >= min_p * values[0]).sum())
    kept = int(min(likely, top_k))
    is_settled = is_all or likely < known or top_k <= likely
    if not is_settled and (top_p >= 1 or min_p > 0 or top_k < torch.inf):
        return None
    if top_p < 1:
        mass = values[:kept].cumsum(0)
        # With top_p alone the total is that of all tokens: the head is enough where it has that share.
        total = mass[-1] if is_settled else _weights(x, best, temperature).cumsum(0)[-1]
        needed = int((mass < top_p * total).sum()) + 1
        if needed > kept:
            return None
        kept = needed
    return ids[order[:kept]].sort().values


def _weights(x: Tensor, best: Tensor, temperature: float) -> Tensor:
    """exp((x - best) / temperature) in float64."""
    wide = x.to(torch.float64)
    return ((wide - best.to(torch.float64)) / temperature).exp_()
