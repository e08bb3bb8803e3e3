"""Attention over some keys and attention over others, joined by their log-sum-exp."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def join_rows(total, total_lse, lse_stride, part, stride_token, stride_head, part_lse, part_stride,
               HEADS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):  # fmt: skip
    """Program (token, head); lse in natural logarithms; `total` and `total_lse` are changed."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    c = tl.arange(0, PAD)
    mask = c < D
    a = tl.load(total_lse + head * lse_stride + token)
    b = tl.load(part_lse + head * part_stride + token)
    top = tl.maximum(a, b)
    x = tl.exp(a - top)
    y = tl.exp(b - top)
    at = total + (token * HEADS + head) * D + c
    mine = tl.load(at, mask=mask, other=0.0)
    other = tl.load(part + token * stride_token + head * stride_head + c, mask=mask, other=0.0)
    tl.store(at, (mine * x + other.to(tl.float32) * y) / (x + y), mask=mask)
    tl.store(total_lse + head * lse_stride + token, top + tl.log(x + y))
