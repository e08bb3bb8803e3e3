"""Drawing from whole rows of logits on a GPU: one program for each row, sums always in the same order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_STRETCH = 4096


def draw_rows(
    logits: Tensor, rows: Tensor, temperature: Tensor, u: Tensor
) -> tuple[Tensor, Tensor]:
    """As `kvant.engine.drawing.draw_from_whole`."""
    count, size = len(rows), logits.shape[1]
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    totals = torch.empty(count, dtype=torch.float64, device=logits.device)
    stretches = triton.next_power_of_2(triton.cdiv(size, _STRETCH))
    _draw[(count,)](
        logits, logits.stride(0), rows, temperature.contiguous(), u.contiguous(), tokens, totals,
        size, STRETCH=_STRETCH, STRETCHES=stretches, num_warps=8,
    )  # fmt: skip
    return tokens, totals


@triton.jit
def _draw(logits, stride, rows, temperatures, shares, tokens, totals, size,
          STRETCH: tl.constexpr, STRETCHES: tl.constexpr):  # fmt: skip
    """Program: one row, in STRETCHES stretches."""
    program = tl.program_id(0)
    row = logits + tl.load(rows + program).to(tl.int64) * stride
    temperature = tl.load(temperatures + program)
    c = tl.arange(0, STRETCH)
    best = tl.full((STRETCH,), float("-inf"), tl.float64)
    for start in range(0, size, STRETCH):
        x = tl.load(row + start + c, mask=start + c < size, other=float("-inf"))
        best = tl.maximum(best, x.to(tl.float64))
    top = tl.max(best, 0)
    s = tl.arange(0, STRETCHES)
    sums = tl.zeros((STRETCHES,), tl.float64)
    for start in range(0, size, STRETCH):
        x = tl.load(row + start + c, mask=start + c < size, other=float("-inf"))
        weights = tl.exp((x.to(tl.float64) - top) / temperature)
        sums = tl.where(s == start // STRETCH, tl.sum(weights, 0), sums)
    ends = tl.cumsum(sums, 0)
    total = tl.max(ends, 0)
    wanted = tl.load(shares + program) * total
    # The stretch in which the share falls: the first whose end is beyond it, or the last with weight.
    last = tl.max(tl.where(sums > 0, s, 0), 0)
    stretch = tl.minimum(tl.sum((ends <= wanted).to(tl.int32), 0), last)
    before = tl.max(tl.where(s < stretch, ends, 0.0), 0)
    at = stretch * STRETCH + c
    x = tl.load(row + at, mask=at < size, other=float("-inf"))
    weights = tl.exp((x.to(tl.float64) - top) / temperature)
    passed = tl.sum((before + tl.cumsum(weights, 0) <= wanted).to(tl.int32), 0)
    furthest = tl.max(tl.where(weights > 0, c, 0), 0)
    tl.store(tokens + program, (stretch * STRETCH + tl.minimum(passed, furthest)).to(tl.int64))
    tl.store(totals + program, total)
