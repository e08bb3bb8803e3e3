"""int4_feedback: int4_per_token_head's bytes, rounded with the errors of the elements before."""

from __future__ import annotations

import numpy as np

from kvant.attention.cpu.arithmetic import (
    NAN_BITS,
    ROW_OUTER,
    ROW_SCALES,
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

_STEPS = np.float32(STEPS)
_HALF, _KEPT = 1 << (DROPPED_BITS - 1), -(1 << DROPPED_BITS)


def _write(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    scales, matrix = load_i64(row + ROW_SCALES), load_i64(row + ROW_OUTER)
    bound_row(x, n)
    rotate_in_place(x, n)
    low = high = ZERO
    for i in range(n):
        y = load_f32(x + 4 * i)
        low, high = min(low, y), max(high, y)
    largest = largest_of(x, n)
    if largest != largest:
        store_i32(scales, NAN_BITS)
        clear_codes(codes, n // 2)
        return
    bits = (bits_of(row_scale(high - low, _STEPS)) + _HALF) & _KEPT
    scale = float_of(bits)
    zero_point = clamped(nearest(-low / scale), ZERO, _STEPS)
    wanted = x + 4 * n  # the kernel's own room behind the row
    for i in range(n):
        store_f32(wanted + 4 * i, load_f32(x + 4 * i))
    for i in range(n):
        code = clamped(nearest(load_f32(wanted + 4 * i) / scale) + zero_point, ZERO, _STEPS)
        if matrix:
            error = load_f32(x + 4 * i) - (code - zero_point) * scale
            line = matrix + 4 * n * i
            for j in range(i + 1, n):
                taken = error * load_f32(line + 4 * j)
                store_f32(wanted + 4 * j, load_f32(wanted + 4 * j) + taken)
        store_f32(x + 4 * i, code)
    pack_nibbles(x, n, codes)
    store_i32(scales, bits | int(zero_point))


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(packed(declared.bits), _write)
