"""int4_short_feedback: int4_short's bytes, rounded with the errors of the elements before."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.format import Kernels
from kvant.attention.triton.formats.int4_feedback import fed_codes
from kvant.attention.triton.formats.int4_short import (
    load_short_scale_and_zero_point,
    scaled_short,
    store_short_row,
)
from kvant.attention.triton.words import decode_uint4
from kvant.kv.format import KVFormat


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    y, broken, scale, word, zero = scaled_short(x, HEAD, PAD, ROWS, PTX)
    code = fed_codes(y, head, there, scale, zero, outer, HEAD, PAD, ROWS, PTX)
    store_short_row(codes, scales, there, code, broken, word, HEAD, PAD, ROWS)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint4, encode, row_scale=load_short_scale_and_zero_point, factor=2.0**20, even=16.0
    )
