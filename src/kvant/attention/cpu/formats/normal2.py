"""normal2: rotated rows in four equal steps, a float16 scale per row."""

from __future__ import annotations

import numpy as np

from kvant.attention.cpu.arithmetic import (
    LEAST,
    NAN_BITS,
    ZERO,
    bound_row,
    clear_codes,
    largest_of,
    row_of,
    store_half,
)
from kvant.attention.cpu.codes import packed
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.formats.turboquant_k import sum_in_pairs, sum_of_squares
from kvant.attention.cpu.layout import Row
from kvant.attention.cpu.rotate import rotate_in_place
from kvant.kernels.cpu.vector import (
    bits_of,
    float_of,
    load_f32,
    load_i64,
    root,
    store_f16,
    store_f32,
    store_u8,
)
from kvant.kv.codecs.normal2 import BOUND
from kvant.kv.format import KVFormat

_BOUND = np.float32(BOUND)
_INNER, _OUTER, _TWO = np.float32(1), np.float32(3), np.float32(2)


def _write(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    scales, sums = load_i64(row + Row.SCALES), x + 4 * n
    bound_row(x, n)
    largest = largest_of(x, n)
    if largest != largest:
        store_f16(scales, float_of(NAN_BITS))
        clear_codes(codes, n // 4)
        return
    unit = max(float_of(bits_of(largest) & 0x7F800000), LEAST)
    for i in range(n):
        store_f32(x + 4 * i, load_f32(x + 4 * i) / unit)
    rotate_in_place(x, n)
    length = root(sum_of_squares(x, n, sums))
    wide = np.float32(np.sqrt(float(n)))
    for four in range(n // 4):
        byte = 0
        for j in range(4):
            i = 4 * four + j
            z = ZERO
            if length != ZERO:
                z = (load_f32(x + 4 * i) * wide) / length
            outer = int(abs(z) > _BOUND)
            code = 1 - outer if z < ZERO else 2 + outer
            store_f32(sums + 4 * i, abs(z) * (_OUTER if outer else _INNER))
            byte |= code << (2 * j)
        store_u8(codes + four, byte)
    together = sum_in_pairs(sums, n)
    scale = ZERO if length == ZERO else (length * wide * _TWO) / together
    store_half(scale * unit, scales)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(packed(declared.bits, (-1.5, -0.5, 0.5, 1.5) * 2), _write)
