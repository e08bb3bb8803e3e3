"""float32, float16 and bfloat16: numbers as they are."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import LARGEST_HALF, bfloat16, bound
from kvant.attention.triton.format import Kernels
from kvant.kv.format import KVFormat


@triton.jit
def decode(x, PTX: tl.constexpr):
    return (x,)


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    target = codes.dtype.element_ty
    c = tl.arange(0, PAD)
    mask = there[:, None] & (c < HEAD)[None, :]
    if x.dtype != target and target == tl.float16:
        x = bound(x.to(tl.float32), -LARGEST_HALF, LARGEST_HALF)
    elif x.dtype != target and target == tl.bfloat16:
        x = bfloat16(x.to(tl.float32))
    tl.store(codes[:, None] + c[None, :], x.to(target), mask=mask)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(decode, encode)
