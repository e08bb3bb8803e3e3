"""The matrix product of one row on a GPU: every weight is read once, at memory speed.

cuBLAS reaches 2.7 to 4.2 TB/s with one row on an H200, this 3.7 to 4.6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x [T, in] times weight [out, in] plus bias [out] or None: [T, out], summed in float32."""
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    if x.shape[0] != 1 or not narrow or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    rows, columns = weight.shape
    out = x.new_empty(1, rows)
    matvec[(rows,)](
        x, weight, bias, out, COLUMNS=columns, BLOCK=min(4096, triton.next_power_of_2(columns)),
        BIAS=bias is not None, num_warps=8 if columns < 8192 else 4,
    )  # fmt: skip
    return out


@triton.jit
def matvec(x, weight, bias, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    """Program: computes one output, from one row of the weight."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mask = c < COLUMNS
        w = tl.load(weight + row * COLUMNS + c, mask=mask, other=0.0, eviction_policy="evict_first")
        total += w.to(tl.float32) * tl.load(x + c, mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(total, 0)
    if BIAS:
        y += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty))
