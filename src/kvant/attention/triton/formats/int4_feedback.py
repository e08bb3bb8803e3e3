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
        # Each number waits for those before it. So lines of the matrix are on their way long before, a
        # number is fetched without a sum over its row, and dividing has no branch.
        STAGES: tl.constexpr = 8 if ROWS * PAD <= 2048 else 4
        column = tl.arange(0, PAD)[None, :]
        first = head[:, None] * HEAD
        mask = there[:, None] & (column < HEAD)
        wanted = y
        code = tl.zeros((ROWS, PAD), tl.float32)
        for i in tl.range(0, HEAD, num_stages=STAGES):
            line = tl.load(outer + (first + i) * HEAD + column, mask=mask, other=0.0)
            place = tl.full((ROWS, 1), 0, tl.int32) + i
            now = tl.gather(wanted, place, 1)
            steps = nearest(divide_rows(now, scale, PTX))
            found = bound(steps + zero[:, None], 0.0, LARGEST)
            error = tl.gather(y, place, 1) - multiply(found - zero[:, None], scale[:, None], PTX)
            code = tl.where(column == i, found, code)
            wanted += multiply(error + 0.0 * line, line, PTX)
    return code


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint4, encode, row_scale=load_scale_and_zero_point, factor=2.0**20, even=16.0
    )
