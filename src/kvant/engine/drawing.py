"""Tokens drawn from many rows at once, none of them depending on the rows beside it.

Rows are worked on in blocks of one fixed size, padded: a library chooses another kernel, and with it
another order of sums, for another number of rows. On a CPU a block is one row.

Everything stays on the rows' device. Only where a distribution is so flat that its likeliest tokens do not
settle the filters is the whole row sorted, and whoever reads the tokens finds that out.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.engine.sampling_params import SamplingParams

HEAD = 1024
"""Tokens that are sorted at first; only a flat distribution or a large top_k needs the whole row."""

_BLOCK = {"cpu": 1}
_DEVICE_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's draw. u: the random number in [0, 1) that decides."""

    params: SamplingParams
    u: float

    @property
    def filters(self) -> bool:
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def block_size(device: torch.device) -> int:
    """Rows of one block on a device."""
    return _BLOCK.get(device.type, _DEVICE_BLOCK)


def draw(logits: Tensor, index: Items[int], draws: Items[Draw]) -> list[int]:
    """A token of each of some rows of logits [n, vocab] whose largest is a finite number."""
    tokens = [0] * len(draws)
    for filters in (False, True):
        places = [place for place, one in enumerate(draws) if one.filters is filters]
        if places:
            own = [draws[place] for place in places]
            found = _draw_some(logits, [index[place] for place in places], own, filters=filters)
            for place, token in zip(places, found, strict=True):
                tokens[place] = token
    return tokens


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host there, without waiting for what runs."""
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def _draw_some(rows: Tensor, places: list[int], draws: list[Draw], *, filters: bool) -> list[int]:
    numbers = torch.tensor([_numbers(one) for one in draws], dtype=torch.float64)
    index = torch.tensor(places)
    head = HEAD if filters else 0
    found, settled = _in_blocks(rows, index, numbers, head)
    tokens: list[int] = found.tolist()
    lacking = (~settled).nonzero().flatten().tolist() if filters else []
    if lacking:
        again, _ = _in_blocks(rows, index[lacking], numbers[lacking], rows.shape[1])
        for place, token in zip(lacking, again.tolist(), strict=True):
            tokens[place] = token
    return tokens


def _numbers(one: Draw) -> tuple[float, ...]:
    params = one.params
    top_k = params.top_k if params.top_k > 0 else torch.inf
    return params.temperature, float(top_k), params.top_p, params.min_p, one.u


def _in_blocks(rows: Tensor, index: Tensor, numbers: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """Tokens, and whether they are settled, of the rows at `index`. head 0: no filters."""
    size, count = block_size(rows.device), len(index)
    short = -count % size
    if short:  # the last one again
        index = torch.cat([index, index[-1:].expand(short)])
        numbers = torch.cat([numbers, numbers[-1:].expand(short, -1)])
    index, numbers = to_device(index, rows.device), to_device(numbers, rows.device)
    parts = []
    for start in range(0, count, size):
        some, own = rows[index[start : start + size]], numbers[start : start + size]
        parts.append(_filtered(some, own, head) if head else _whole(some, own))
    tokens = torch.cat([part[0] for part in parts])[:count]
    settled = torch.cat([part[1] for part in parts])[:count]
    return tokens.cpu(), settled.cpu()


def _weights(rows: Tensor, temperature: Tensor) -> Tensor:
    """exp((x - max) / temperature) in float64."""
    x = rows.to(torch.float64)
    return x.sub_(x.amax(-1, keepdim=True)).div_(temperature[:, None]).exp_()


def _whole(rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    mass = _weights(rows, numbers[:, 0]).cumsum(-1)
    token = torch.searchsorted(mass, numbers[:, 4:] * mass[:, -1:], right=True)
    token = token[:, 0].clamp_(max=rows.shape[1] - 1)
    return token, torch.ones_like(token, dtype=torch.bool)


def _filtered(rows: Tensor, numbers: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """From what the filters leave, likeliest first (smaller ids first among equals). Each filter
    keeps a beginning of that order, so the shortest one decides.

    Of the likeliest `head` tokens those as unlikely as the last do not count: their equals may be
    missing.
    """
    temperature, top_k, top_p, min_p, u = (part[:, None] for part in numbers.unbind(1))
    weights = _weights(rows, temperature[:, 0])
    size = rows.shape[1]
    if head < size:
        ids, _ = rows.topk(head).indices.sort(-1)  # the weights' order, in a narrower dtype
        values = weights.gather(1, ids)
        complete = (values > values.amin(-1, keepdim=True)).sum(-1, keepdim=True)
        values, order = values.sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order)
    else:
        values, ids = weights.sort(dim=-1, descending=True, stable=True)
        complete = torch.full_like(ids[:, :1], size)
    place = torch.arange(values.shape[1], device=rows.device)
    settled = complete == size

    likely = ((values >= min_p * values[:, :1]) & (place < complete)).sum(-1, keepdim=True)
    settled |= likely < complete
    settled |= top_k <= likely
    kept = torch.minimum(likely.to(torch.float64), top_k).to(torch.int64)
    cut = (min_p > 0) | torch.isfinite(top_k)

    # With top_p alone the total is that of all tokens, and the head is enough where it has that share.
    mass = torch.where(place < kept, values, 0.0).cumsum(-1)
    total = torch.where(cut, mass[:, -1:], weights.cumsum(-1)[:, -1:])
    needed = (mass < top_p * total).sum(-1, keepdim=True) + 1
    by_share = (top_p < 1) & (needed <= kept) & (settled | ~cut)
    settled |= by_share
    kept = torch.where(by_share, needed, kept)

    last = mass.gather(1, (kept - 1).clamp_(min=0))
    token = torch.searchsorted(mass, u * last, right=True)
    token = ids.gather(1, torch.minimum(token, kept - 1).clamp_(min=0))
    return token[:, 0], (settled & (complete > 0))[:, 0]
