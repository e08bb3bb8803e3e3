"""A kernel that adds all ranks' parts, gathered on one GPU, in order and in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def added(parts: Tensor) -> Tensor:
    """Returns the sum [..] of parts [size, ..], contiguous, in the parts' dtype."""
    out = torch.empty_like(parts[0])
    count = out.numel()
    _added[(triton.cdiv(count, _BLOCK),)](parts, out, count, SIZE=len(parts), BLOCK=_BLOCK)
    return out


@triton.jit
def _added(parts, out, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(SIZE):
        total += tl.load(parts + r * count.to(tl.int64) + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
