"""int4_feedback: int4_per_token_head's bytes, rounded with the errors of the elements before."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import (
    NAN_BITS,
    bound,
    divide,
    has_nan,
    multiply,
    nearest,
    row_scale,
    store_packed,
    widen,
)
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.formats.int4_per_token_head import (
    DROPPED,
    LARGEST,
    load_scale_and_zero_point,
)
from kvant.attention.triton.rotation import hadamard
from kvant.attention.triton.words import decode_uint4
from kvant.kv.format import KVFormat


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    broken = has_nan(x)
    y = hadamard(tl.where(broken[:, None], 0.0, widen(x)), ROWS, PAD, HEAD & -HEAD)
    low = tl.minimum(tl.min(y, 1), 0.0)
    high = tl.maximum(tl.max(y, 1), 0.0)
    scale = row_scale(high - low, LARGEST, PTX)
    bits = (scale.to(tl.int32, bitcast=True) + DROPPED // 2) & -DROPPED
    scale = bits.to(tl.float32, bitcast=True)
    zero = bound(nearest(divide(0.0 - low, scale, PTX)), 0.0, LARGEST)
    if outer is None:
        steps = nearest(divide(y, scale[:, None] + 0.0 * tl.abs(y), PTX))
        code = bound(steps + zero[:, None], 0.0, LARGEST)
    else:
        column = tl.arange(0, PAD)[None, :]
        wanted = y
        code = tl.zeros((ROWS, PAD), tl.float32)
        for i in range(HEAD):
            here = column == i
            now = tl.sum(tl.where(here, wanted, 0.0), 1)
            found = bound(nearest(divide(now, scale, PTX)) + zero, 0.0, LARGEST)
            error = tl.sum(tl.where(here, y, 0.0), 1) - multiply(found - zero, scale, PTX)
            code = tl.where(here, found[:, None], code)
            place = (head[:, None] * HEAD + i) * HEAD + column
            line = tl.load(outer + place, mask=there[:, None] & (column < HEAD), other=0.0)
            wanted += multiply(error[:, None] + 0.0 * line, line, PTX)
    code = tl.where(broken[:, None], 0, code.to(tl.int32))
    store_packed(codes, there, code, HEAD, ROWS, PAD, 4)
    tl.store(scales, tl.where(broken, NAN_BITS, bits | zero.to(tl.int32)), mask=there)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint4, encode, row_scale=load_scale_and_zero_point, factor=2.0**20, even=16.0
    )
