"""Arithmetic of writers: the definitions in `kvant.kv.codecs`, one row in memory at a time.

Every operation is one IEEE float32 operation, in the order of the definition; nothing here may be compiled
with fast-math. Rows x are float32 [n] at an address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvant.attention.cpu.layout import Row
from kvant.kernels.cpu.vector import (
    bits_of,
    float_of,
    load_f16,
    load_f32,
    load_i64,
    store_f16,
    store_f32,
    store_u8,
)
from kvant.kv.codecs import CLAMP
from kvant.kv.codecs.conversion import MIN_ROW_SCALE
from kvant.kv.codecs.float8 import FLOAT8, Float8
from kvant.kv.format import Encoding

ZERO = np.float32(0)
LEAST = np.float32(MIN_ROW_SCALE)
LARGEST_HALF = np.float32(Encoding.FLOAT16.largest)
NAN_BITS = 0x7FC00000
_BOUND = np.float32(CLAMP)


@njit(inline="always")
def row_of(row: int) -> tuple[int, int, int]:
    """Returns the number of elements, and the addresses of the row in float32 and of its codes."""
    return load_i64(row + Row.HEAD_DIM), load_i64(row + Row.NUMBERS), load_i64(row + Row.CODES)


@njit(inline="always")
def clamped(x: Any, low: Any, high: Any) -> Any:
    """Clamps x to low .. high; NaN stays NaN."""
    if x < low:
        x = low
    if x > high:
        x = high
    return x


@njit(inline="always")
def bound_row(x: int, n: int) -> None:
    for i in range(n):
        store_f32(x + 4 * i, clamped(load_f32(x + 4 * i), -_BOUND, _BOUND))


@njit(inline="always")
def largest_of(x: int, n: int) -> Any:
    """Returns the largest magnitude; NaN if there is one (its bits exceed every number's)."""
    found = 0
    for i in range(n):
        found = max(found, bits_of(load_f32(x + 4 * i)) & 0x7FFFFFFF)
    return float_of(found)


@njit(inline="always")
def row_scale(span: Any, steps: Any) -> Any:
    """Returns span / steps, at least the smallest normal number; one canonical NaN for every NaN."""
    if span != span:
        return float_of(NAN_BITS)
    return max(span / steps, LEAST)


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


def _float8_encoder(float8: Float8) -> Any:
    """Returns a function from float32 to the nearest code, ties to even, saturating; NaN is 0x7f."""
    mantissa, bias = float8.mantissa_bits, float8.bias
    shift = 23 - mantissa
    rest, offset = (1 << (shift - 1)) - 1, (127 - bias) << mantissa
    least, most = _bits(2.0 ** (1 - bias)), _bits(float8.max)
    most_code, nan = (most >> shift) - offset, float8.nan_code
    # Numbers below the smallest normal one are multiples of 2^(1 - bias - mantissa). This is also the step of
    # float32 numbers near `grid`, so adding grid rounds to them.
    grid = np.float32(2.0 ** (1 - bias - mantissa + 23))
    grid_bits = _bits(grid)

    @njit
    def encode(x: Any) -> int:
        bits = bits_of(x)
        sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
        small = bits_of(float_of(size) + grid) - grid_bits
        normal = ((size + rest + ((size >> shift) & 1)) >> shift) - offset
        code = small if size < least else normal
        code = most_code if size >= most else code
        return nan if size > 0x7F800000 else sign | code

    return encode


e4m3_code = _float8_encoder(FLOAT8[Encoding.E4M3FN])
e5m2_code = _float8_encoder(FLOAT8[Encoding.E5M2])


@njit(inline="always")
def store_half(x: Any, place: int) -> Any:
    """Stores x as float16, saturating, never as -0; returns the stored value."""
    x = clamped(x, -LARGEST_HALF, LARGEST_HALF)
    store_f16(place, x)
    x = load_f16(place)
    if x == ZERO:
        store_f16(place, ZERO)
    return x


@njit(inline="always")
def pack_nibbles(x: int, n: int, codes: int) -> None:
    """Packs integers 0..15, stored as float32, two per byte, even ones in the low half."""
    for i in range(n // 2):
        low, high = int(load_f32(x + 8 * i)), int(load_f32(x + 8 * i + 4))
        store_u8(codes + i, low | (high << 4))


@njit(inline="always")
def pack_threes(x: int, n: int, codes: int) -> None:
    """Packs integers 0..7, stored as float32, eight in three bytes."""
    for i in range(n // 8):
        word = 0
        for j in range(8):
            word |= int(load_f32(x + 32 * i + 4 * j)) << (3 * j)
        for j in range(3):
            store_u8(codes + 3 * i + j, (word >> (8 * j)) & 0xFF)


@njit(inline="always")
def clear_codes(codes: int, num_bytes: int) -> None:
    for i in range(num_bytes):
        store_u8(codes + i, 0)
