"""int4_feedback: int4_per_token_head's bytes, rounded with the errors of the elements before."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import (
    bound,
    divide,
    multiply,
    nearest,
)
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.formats.int4_per_token_head import (
    LARGEST,
    load_scale_and_zero_point,
    nearest_codes,
    scaled,
    store_row,
)
from kvant.attention.triton.words import decode_uint4
from kvant.kv.format import KVFormat


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    y, broken, scale, bits, zero = scaled(x, HEAD, PAD, ROWS, PTX)
    code = fed_codes(y, head, there, scale, zero, outer, HEAD, PAD, ROWS, PTX)
    store_row(codes, scales, there, code, broken, bits, zero, HEAD, PAD, ROWS)


@triton.jit
def fed_codes(
    y, head, there, scale, zero, outer, HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Returns codes like `nearest_codes`, rounded with matrices `outer` [heads, HEAD, HEAD].

    None for zeros.
    """
    if outer is None:
        code = nearest_codes(y, scale, zero, PTX)
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
    return code


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint4, encode, row_scale=load_scale_and_zero_point, factor=2.0**20, even=16.0
    )
