"""turboquant_k4 and turboquant_k3: rotated rows in a codebook, a float16 scale per row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from kvant.attention.cpu.arithmetic import (
    LEAST,
    NAN_BITS,
    ZERO,
    bound_row,
    clear_codes,
    largest_of,
    pack_nibbles,
    pack_threes,
    row_of,
    store_half,
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
    root,
    store_f16,
    store_f32,
)
from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT, middles
from kvant.kv.format import KVFormat


@njit
def sum_of_squares(x: int, n: int, sums: int) -> Any:
    """Returns the sum of squares, added as `sum_in_pairs` adds. sums: scratch [n]."""
    for i in range(n):
        store_f32(sums + 4 * i, load_f32(x + 4 * i) * load_f32(x + 4 * i))
    return sum_in_pairs(sums, n)


@njit
def sum_in_pairs(sums: int, n: int) -> Any:
    """Adds neighbours of sums [n], then neighbours of these sums, in place. Returns the last one."""
    while n > 1:
        half = n // 2
        for i in range(half):
            store_f32(sums + 4 * i, load_f32(sums + 8 * i) + load_f32(sums + 8 * i + 4))
        if n % 2:
            store_f32(sums + 4 * half, load_f32(sums + 4 * (n - 1)))
        n = half + n % 2
    return load_f32(sums)


def _writer(centroids: tuple[float, ...]) -> Callable[[int, int], None]:
    levels = tuple(np.float32(c) for c in centroids[: len(centroids) // 2])
    bounds = tuple(np.float32(m) for m in middles(centroids))
    signed, is_wide = len(levels), len(levels) == 8

    def write(row: int, _: int) -> None:
        n, x, codes = row_of(row)
        scales, sums = load_i64(row + Row.SCALES), x + 4 * n
        bound_row(x, n)
        largest = largest_of(x, n)
        if largest != largest:
            store_f16(scales, float_of(NAN_BITS))
            clear_codes(codes, n // 2 if is_wide else n // 8 * 3)
            return
        unit = max(float_of(bits_of(largest) & 0x7F800000), LEAST)
        for i in range(n):
            store_f32(x + 4 * i, load_f32(x + 4 * i) / unit)
        rotate_in_place(x, n)
        length = root(sum_of_squares(x, n, sums))
        wide = np.float32(np.sqrt(float(n)))
        found = sums + 4 * n
        for i in range(n):
            z = ZERO
            if length != ZERO:
                z = (load_f32(x + 4 * i) * wide) / length
            size, code = abs(z), 0
            for bound in bounds:
                code += size > bound
            store_f32(found + 4 * i, levels[code])
            store_f32(x + 4 * i, np.float32(code + (signed if z < ZERO else 0)))
        if is_wide:
            pack_nibbles(x, n, codes)
        else:
            pack_threes(x, n, codes)
        store_half((length / root(sum_of_squares(found, n, sums))) * unit, scales)

    return write


_WRITE4, _WRITE3 = _writer(CENTROIDS_4BIT), _writer(CENTROIDS_3BIT)


def kernels(declared: KVFormat) -> Kernels:
    if declared.bits == 4:
        return Kernels(packed(4, CENTROIDS_4BIT), _WRITE4)
    return Kernels(packed(3, CENTROIDS_3BIT), _WRITE3)
