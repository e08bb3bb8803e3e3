"""Tokens drawn from many rows at once, none of them depending on the rows beside it.

A library may sum in another order for another number of rows. So sums over a whole vocabulary run in a
kernel of our own, one program for each row (on a CPU row by row), and sums over the likeliest tokens in
blocks of a fixed number of rows, padded. Selecting, sorting and functions of single numbers are the same
for a row wherever it stands.

Where a distribution is so flat that its likeliest tokens do not settle the filters, the whole row is
sorted: the one case that needs a second look of the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.engine.sampling_params import SamplingParams

HEAD = 1024
"""Tokens that are sorted at first; only a flat distribution or a large top_k needs the whole row."""

_BLOCK = 64
"""Rows of likeliest tokens that are worked on together."""

_WHOLE_BLOCK = 8
"""Rows that are sorted together."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's draw. u: the random number in [0, 1) that decides."""

    params: SamplingParams
    u: float

    @property
    def filters(self) -> bool:
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """temperature, top_k (infinity for none), top_p, min_p, u."""
        params = self.params
        top_k = float(params.top_k) if params.top_k > 0 else torch.inf
        return params.temperature, top_k, params.top_p, params.min_p, self.u


def draw(logits: Tensor, index: Items[int], draws: Items[Draw]) -> list[int]:
    """A token of each of some rows of logits [n, vocab] whose largest is a finite number."""
    tokens = [0] * len(draws)
    for filters in (False, True):
        places = [place for place, one in enumerate(draws) if one.filters is filters]
        if not places:
            continue
        rows = to_device(torch.tensor([index[place] for place in places]), logits.device)
        table = torch.tensor([draws[place].numbers for place in places], dtype=torch.float64)
        numbers = to_device(table, logits.device)
        if filters:
            # Only these ask for the sum of all weights; the host knows them without looking there.
            by_share_alone = (table[:, 1] == torch.inf) & (table[:, 2] < 1) & (table[:, 3] <= 0)
            found = _filtered(logits, rows, numbers, by_share_alone=bool(by_share_alone.any()))
        else:
            found = draw_from_whole(logits, rows, numbers[:, 0], numbers[:, 4])[0].tolist()
        for place, token in zip(places, found, strict=True):
            tokens[place] = token
    return tokens


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host there, without waiting for what runs."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def draw_from_whole(
    logits: Tensor, rows: Tensor, temperature: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """Of some rows the token in which the share u of all weights falls, in the order of ids, and their
    sum: [n] int64, [n] float64. The weights are exp((x - max) / temperature).
    """
    if logits.device.type != "cpu":
        from kvant.engine.triton_draw import draw_rows

        return draw_rows(logits, rows, temperature, u)
    tokens, totals = [], []
    for row, heat, share in zip(rows.tolist(), temperature, u, strict=True):
        mass = _weights(logits[row], logits[row].max(), heat).cumsum(0)
        token = torch.searchsorted(mass, share * mass[-1], right=True)
        tokens.append(token.clamp_(max=len(mass) - 1))
        totals.append(mass[-1])
    return torch.stack(tokens), torch.stack(totals)


def _filtered(logits: Tensor, rows: Tensor, numbers: Tensor, *, by_share_alone: bool) -> list[int]:
    """From what the filters leave, likeliest first, smaller ids first among equals.

    by_share_alone: whether any row has no other filter than top_p.
    """
    if by_share_alone:
        _, totals = draw_from_whole(logits, rows, numbers[:, 0], numbers[:, 4])
    else:
        totals = numbers.new_zeros(len(rows))
    found = []
    for start in range(0, len(rows), _BLOCK):
        some = slice(start, start + _BLOCK)
        found.append(torch.stack(_from_likeliest(logits[rows[some]], numbers[some], totals[some])))
    tokens: list[int]
    tokens, settled = torch.cat(found, 1).tolist()
    lacking = [place for place, is_settled in enumerate(settled) if not is_settled]
    for start in range(0, len(lacking), _WHOLE_BLOCK):
        places = lacking[start : start + _WHOLE_BLOCK]
        part = to_device(torch.tensor(places), logits.device)
        whole = _from_all(logits[rows[part]], numbers[part])
        for place, token in zip(places, whole.tolist(), strict=True):
            tokens[place] = token
    return tokens


def _from_likeliest(x: Tensor, numbers: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and whether they are settled, of rows [n, vocab]; HEAD of each are sorted.

    Those as unlikely as the last of them do not count: their equals may be missing.
    """
    count, size = x.shape
    if size <= HEAD:
        return _from_all(x, numbers), torch.ones(count, dtype=torch.bool, device=x.device)
    best, ids = x.topk(HEAD)  # the weights' order, in a narrower dtype
    ids, order = ids.sort(-1)
    best = best.gather(1, order)
    values = _weights(best, best.amax(-1, keepdim=True), numbers[:, :1])
    complete = (values > values.amin(-1, keepdim=True)).sum(-1, keepdim=True)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    return _choose(values, ids, complete, size, totals, numbers, _BLOCK)


def _from_all(x: Tensor, numbers: Tensor) -> Tensor:
    """The same with every token sorted, which settles everything."""
    values = _weights(x, x.amax(-1, keepdim=True), numbers[:, :1])
    values, ids = values.sort(dim=-1, descending=True, stable=True)
    complete = torch.full_like(ids[:, :1], x.shape[1])
    totals = numbers.new_zeros(len(x))  # of all tokens: not asked for, `complete` are all
    return _choose(values, ids, complete, x.shape[1], totals, numbers, _WHOLE_BLOCK)[0]


def _choose(
    values: Tensor,
    ids: Tensor,
    complete: Tensor,
    size: int,
    totals: Tensor,
    numbers: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Each filter keeps a beginning of the order, so the shortest one decides.

    values: sorted weights, [n, h] float64, of tokens `ids`; the first `complete` [n, 1] of them are
    those of the whole order of `size`. totals: of all weights, where `complete` are not all.
    """
    count, width = values.shape
    _, top_k, top_p, min_p, u = (part[:, None] for part in numbers.unbind(1))
    place = torch.arange(width, device=values.device)
    likely = ((values >= min_p * values[:, :1]) & (place < complete)).sum(-1, keepdim=True)
    settled = (complete == size) | (likely < complete) | (top_k <= likely)
    kept = torch.minimum(likely.to(torch.float64), top_k).to(torch.int64)
    cut = (min_p > 0) | torch.isfinite(top_k) | (complete == size)

    mass = torch.where(place < kept, values, 0.0)
    if values.device.type != "cpu":
        mass = F.pad(mass, (0, 0, 0, block - count))
    mass = mass.cumsum(-1)[:count]
    # With top_p alone the total is that of all tokens: the head is enough where it has that share.
    total = torch.where(cut, mass[:, -1:], totals[:, None])
    needed = (mass < top_p * total).sum(-1, keepdim=True) + 1
    by_share = (top_p < 1) & (needed <= kept) & (settled | ~cut)
    settled |= by_share
    kept = torch.where(by_share, needed, kept)

    last = mass.gather(1, (kept - 1).clamp_(min=0))
    chosen = torch.searchsorted(mass, u * last, right=True)
    token = ids.gather(1, torch.minimum(chosen, kept - 1).clamp_(min=0))
    return token[:, 0], (settled & (complete > 0))[:, 0]


def _weights(x: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """exp((x - best) / temperature) in float64."""
    wide = x.to(torch.float64)
    return ((wide - best.to(torch.float64)) / temperature).exp_()
