"""int4_short: int4_per_token_head with a scale of 12 bits above the zero point's 4."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvant.attention.cpu.arithmetic import ZERO, clamped, row_scale
from kvant.attention.cpu.codes import packed
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.formats.int4_per_token_head import LARGEST, rotated_range, store_nearest
from kvant.attention.cpu.layout import Row
from kvant.kernels.cpu.vector import bits_of, float_of, load_i64, nearest, store_u8
from kvant.kv.codecs.int4_short import (
    DROPPED_BITS,
    LARGEST_SCALE,
    LEAST_SCALE,
    NAN_WORD,
    OFFSET,
)
from kvant.kv.format import KVFormat

_HALF, _KEPT = 1 << (DROPPED_BITS - 1), -(1 << DROPPED_BITS)
_LEAST, _MOST = np.float32(LEAST_SCALE), np.float32(LARGEST_SCALE)


@njit(inline="always")
def scaled_short(row: int) -> tuple[Any, Any]:
    """Implements `int4_per_token_head.scaled` for scales of 12 bits."""
    scales = load_i64(row + Row.SCALES)
    low, high = rotated_range(row)
    if low != low:
        store_u8(scales, NAN_WORD & 0xFF)
        store_u8(scales + 1, NAN_WORD >> 8)
        return low, ZERO
    bits = (bits_of(clamped(row_scale(high - low, LARGEST), _LEAST, _MOST)) + _HALF) & _KEPT
    scale = float_of(bits)
    zero_point = clamped(nearest(-low / scale), ZERO, LARGEST)
    word = ((bits >> DROPPED_BITS) - OFFSET) << 4 | int(zero_point)
    store_u8(scales, word & 0xFF)
    store_u8(scales + 1, word >> 8)
    return scale, zero_point


def _write(row: int, _: int) -> None:
    scale, zero_point = scaled_short(row)
    store_nearest(row, scale, zero_point)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(packed(declared.bits), _write)
