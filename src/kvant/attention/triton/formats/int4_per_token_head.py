"""int4_per_token_head: rotated rows in steps, a float32 scale with a zero point in its low bits per row."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import (
    NAN_BITS,
    bound,
    divide,
    has_nan,
    nearest,
    row_scale,
    store_packed,
    widen,
)
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.rotation import hadamard
from kvant.attention.triton.words import decode_uint4
from kvant.kv.codecs.int4_per_token_head import DROPPED_BITS, STEPS, ZERO_POINT_MASK
from kvant.kv.format import KVFormat

LARGEST = tl.constexpr(STEPS)
MASK = tl.constexpr(ZERO_POINT_MASK)
DROPPED = tl.constexpr(1 << DROPPED_BITS)


@triton.jit
def load_scale_and_zero_point(pointer, there):
    """Loads scale and zero point of rows, float32 [rows] each; pointer: the scale plane as int32."""
    bits = tl.load(pointer, mask=there, other=0)
    return (bits & ~MASK).to(tl.float32, bitcast=True), (bits & MASK).to(tl.float32)


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    y, broken, scale, bits, zero = scaled(x, HEAD, PAD, ROWS, PTX)
    code = nearest_codes(y, scale, zero, PTX)
    store_row(codes, scales, there, code, broken, bits, zero, HEAD, PAD, ROWS)


@triton.jit
def nearest_codes(y, scale, zero, PTX: tl.constexpr):
    """Returns codes, as float32, of rotated rows y [ROWS, PAD]; scale, zero: [ROWS]."""
    steps = nearest(divide(y, scale[:, None] + 0.0 * tl.abs(y), PTX))
    return bound(steps + zero[:, None], 0.0, LARGEST)


@triton.jit
def rotated_range(x, HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Returns rotated rows [ROWS, PAD], and per row [ROWS]: has NaN, its smallest number or 0, the step."""
    broken = has_nan(x)
    y = hadamard(tl.where(broken[:, None], 0.0, widen(x)), ROWS, PAD, HEAD & -HEAD)
    low = tl.minimum(tl.min(y, 1), 0.0)
    high = tl.maximum(tl.max(y, 1), 0.0)
    return y, broken, low, row_scale(high - low, LARGEST, PTX)


@triton.jit
def scaled(x, HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Returns rotated rows [ROWS, PAD], and per row [ROWS]: has NaN, scale, scale as bits, zero point."""
    y, broken, low, scale = rotated_range(x, HEAD, PAD, ROWS, PTX)
    bits = (scale.to(tl.int32, bitcast=True) + DROPPED // 2) & -DROPPED
    scale = bits.to(tl.float32, bitcast=True)
    zero = bound(nearest(divide(0.0 - low, scale, PTX)), 0.0, LARGEST)
    return y, broken, scale, bits, zero


@triton.jit
def store_row(
    codes, scales, there, code, broken, bits, zero, HEAD: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Stores codes [ROWS, PAD] in float32, and scales with their zero points. Rows with NaN get codes 0."""
    code = tl.where(broken[:, None], 0, code.to(tl.int32))
    store_packed(codes, there, code, HEAD, ROWS, PAD, 4)
    tl.store(scales, tl.where(broken, NAN_BITS, bits | zero.to(tl.int32)), mask=there)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint4, encode, row_scale=load_scale_and_zero_point, factor=2.0**20, even=16.0
    )
