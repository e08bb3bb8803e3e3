"""int4_feedback: int4_per_token_head's bytes, rounded with the errors of the elements before."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import (
    bound,
    divide_rows,
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
        first = head[:, None] * HEAD
        mask = there[:, None] & (column < HEAD)
        wanted = y
        code = tl.zeros((ROWS, PAD), tl.float32)
        line = tl.load(outer + first * HEAD + column, mask=mask, other=0.0)
        for i in range(HEAD):
            # Loads the next line before this number is rounded, and divides without a branch: each number
            # waits for all before it, and 128 of them took 48 us on an H200 otherwise.
            following = tl.load(
                outer + (first + i + 1) * HEAD + column, mask=mask & (i + 1 < HEAD), other=0.0
            )
            here = column == i
            now = tl.sum(tl.where(here, wanted, 0.0), 1)[:, None]
            given = tl.sum(tl.where(here, y, 0.0), 1)[:, None]
            found = nearest(divide_rows(now, scale, PTX)) + zero[:, None]
            found = bound(found, 0.0, LARGEST)
            error = given - multiply(found - zero[:, None], scale[:, None], PTX)
            code = tl.where(here, found, code)
            wanted += multiply(error + 0.0 * line, line, PTX)
            line = following
    return code


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint4, encode, row_scale=load_scale_and_zero_point, factor=2.0**20, even=16.0
    )
