"""nvfp4: e2m1 in units of an e4m3 scale per block of 16, and of one scale from outside the pages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvant.attention.cpu.arithmetic import (
    ZERO,
    bound_row,
    clamped,
    e4m3_code,
    largest_of,
    row_of,
)
from kvant.attention.cpu.codes import packed
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.layout import Row
from kvant.kernels.cpu.vector import bits_of, float_of, load_f32, load_i64, nearest, store_u8
from kvant.kv.codecs.e2m1 import MAGNITUDES
from kvant.kv.format import Encoding, KVFormat

_LARGEST = np.float32(Encoding.E2M1.largest)
_HALF, _ONE, _TWO, _FOUR = (np.float32(n) for n in (0.5, 1, 2, 4))


@njit(inline="always")
def _e2m1_code(x: Any) -> int:
    """Returns the nearest e2m1 code, ties to even, saturating at 6. x must not be NaN."""
    size = abs(x)
    code = nearest(min(size * _TWO, _FOUR))
    code += nearest(clamped(size - _TWO, ZERO, _TWO))
    code += nearest(clamped((size - _FOUR) * _HALF, ZERO, _ONE))
    return int(code) | ((bits_of(x) >> 28) & 8)


def _write(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    outer, numbers = float_of(load_i64(row + Row.OUTER)), load_i64(row + Row.E4M3)
    bound_row(x, n)
    for block in range(n // 16):
        start = x + 64 * block
        largest = largest_of(start, 16)
        scale = e4m3_code(largest / _LARGEST / outer)
        if scale == 0 and largest > ZERO:
            scale = 1  # 2^-9
        store_u8(load_i64(row + Row.SCALES) + block, scale)
        step = load_f32(numbers + 4 * scale) * outer
        for i in range(8):
            code = 0
            if step > ZERO:
                code = _e2m1_code(load_f32(start + 8 * i) / step)
                code |= _e2m1_code(load_f32(start + 8 * i + 4) / step) << 4
            store_u8(codes + 8 * block + i, code)


def kernels(declared: KVFormat) -> Kernels:
    assert declared.block == 16, "a block is a vector of lanes"
    numbers = (*MAGNITUDES, *(-x for x in MAGNITUDES))
    return Kernels(packed(declared.bits, numbers, in_blocks=True), _write)
