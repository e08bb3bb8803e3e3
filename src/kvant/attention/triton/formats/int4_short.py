"""int4_short: int4_per_token_head with a scale of 12 bits above the zero point's 4."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import NAN_BITS, bound, divide, nearest, store_packed
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.formats.int4_per_token_head import (
    LARGEST,
    nearest_codes,
    rotated_range,
)
from kvant.attention.triton.words import decode_uint4, load_halfwords
from kvant.kv.codecs import int4_short
from kvant.kv.format import KVFormat

DROPPED_BITS = tl.constexpr(int4_short.DROPPED_BITS)
HALF = tl.constexpr(1 << (int4_short.DROPPED_BITS - 1))
LEAST_SCALE = tl.constexpr(int4_short.LEAST_SCALE)
LARGEST_SCALE = tl.constexpr(int4_short.LARGEST_SCALE)
OFFSET = tl.constexpr(int4_short.OFFSET)
NAN_WORD = tl.constexpr(int4_short.NAN_WORD)


@triton.jit
def load_short_scale_and_zero_point(pointer, there):
    """Loads scale and zero point of rows, float32 [rows] each; pointer: the scale plane as int16."""
    word = load_halfwords(pointer, there)
    bits = ((word >> 4) + OFFSET) << DROPPED_BITS
    bits = tl.where(word >= NAN_WORD, NAN_BITS, bits)
    return bits.to(tl.float32, bitcast=True), (word & 15).to(tl.float32)


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    y, broken, scale, word, zero = scaled_short(x, HEAD, PAD, ROWS, PTX)
    code = nearest_codes(y, scale, zero, PTX)
    store_short_row(codes, scales, there, code, broken, word, HEAD, PAD, ROWS)


@triton.jit
def scaled_short(x, HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Returns rotated rows [ROWS, PAD], and per row [ROWS]: has NaN, scale, the stored word, zero point."""
    y, broken, low, scale = rotated_range(x, HEAD, PAD, ROWS, PTX)
    bits = bound(scale, LEAST_SCALE, LARGEST_SCALE).to(tl.int32, bitcast=True)
    upper = (bits + HALF) >> DROPPED_BITS
    scale = (upper << DROPPED_BITS).to(tl.float32, bitcast=True)
    zero = bound(nearest(divide(0.0 - low, scale, PTX)), 0.0, LARGEST)
    return y, broken, scale, ((upper - OFFSET) << 4) | zero.to(tl.int32), zero


@triton.jit
def store_short_row(
    codes, scales, there, code, broken, word, HEAD: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Stores codes [ROWS, PAD] in float32, and words. Rows with NaN get codes 0."""
    code = tl.where(broken[:, None], 0, code.to(tl.int32))
    store_packed(codes, there, code, HEAD, ROWS, PAD, 4)
    tl.store(scales, tl.where(broken, NAN_WORD, word).to(tl.int16), mask=there)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint4, encode, row_scale=load_short_scale_and_zero_point, factor=2.0**20, even=16.0
    )
