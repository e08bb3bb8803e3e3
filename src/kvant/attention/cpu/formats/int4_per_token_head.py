"""int4_per_token_head: rotated rows in steps, a float32 scale with a zero point in its low bits per row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvant.attention.cpu.arithmetic import (
    NAN_BITS,
    ZERO,
    bound_row,
    clamped,
    clear_codes,
    largest_of,
    pack_nibbles,
    row_of,
    row_scale,
)
from kvant.attention.cpu.codes import packed
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.layout import Row
from kvant.attention.cpu.rotate import rotate_in_place
from kvant.kernels.cpu.vector import (
    bits_of,
    float_of,
    load_f32,
    load_i64,
    nearest,
    store_f32,
    store_i32,
)
from kvant.kv.codecs.int4_per_token_head import DROPPED_BITS, STEPS
from kvant.kv.format import KVFormat

LARGEST = np.float32(STEPS)
_HALF, _KEPT = 1 << (DROPPED_BITS - 1), -(1 << DROPPED_BITS)


@njit(inline="always")
def rotated_range(row: int) -> tuple[Any, Any]:
    """Rotates a row in place; returns its smallest and largest number, or 0 if that is beyond them.

    Both are NaN for a row with NaN, whose codes are stored as 0.
    """
    n, x, codes = row_of(row)
    bound_row(x, n)
    rotate_in_place(x, n)
    low = high = ZERO
    for i in range(n):
        y = load_f32(x + 4 * i)
        low, high = min(low, y), max(high, y)
    largest = largest_of(x, n)
    if largest != largest:
        clear_codes(codes, n // 2)
        return largest, largest
    return low, high


@njit(inline="always")
def scaled(row: int) -> tuple[Any, Any]:
    """Rotates a row in place, stores its scale with the zero point, and returns both.

    The scale of a row with NaN is NaN, and its codes are stored as 0.
    """
    scales = load_i64(row + Row.SCALES)
    low, high = rotated_range(row)
    if low != low:
        store_i32(scales, NAN_BITS)
        return low, ZERO
    bits = (bits_of(row_scale(high - low, LARGEST)) + _HALF) & _KEPT
    scale = float_of(bits)
    zero_point = clamped(nearest(-low / scale), ZERO, LARGEST)
    store_i32(scales, bits | int(zero_point))
    return scale, zero_point


def _write(row: int, _: int) -> None:
    scale, zero_point = scaled(row)
    store_nearest(row, scale, zero_point)


@njit(inline="always")
def store_nearest(row: int, scale: Any, zero_point: Any) -> None:
    """Stores the codes of a rotated row; nothing if the scale is NaN."""
    n, x, codes = row_of(row)
    if scale != scale:
        return
    for i in range(n):
        code = nearest(load_f32(x + 4 * i) / scale) + zero_point
        store_f32(x + 4 * i, clamped(code, ZERO, LARGEST))
    pack_nibbles(x, n, codes)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(packed(declared.bits), _write)
