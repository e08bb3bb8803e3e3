"""int4_feedback: int4_per_token_head's bytes, rounded with the errors of the elements before."""

from __future__ import annotations

from typing import Any

from numba import njit

from kvant.attention.cpu.arithmetic import ZERO, clamped, pack_nibbles, row_of
from kvant.attention.cpu.codes import packed
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.formats.int4_per_token_head import LARGEST, scaled
from kvant.attention.cpu.layout import Row
from kvant.kernels.cpu.vector import load_f32, load_i64, nearest, store_f32
from kvant.kv.format import KVFormat


def _write(row: int, _: int) -> None:
    scale, zero_point = scaled(row)
    store_fed(row, scale, zero_point)


@njit(inline="always")
def store_fed(row: int, scale: Any, zero_point: Any) -> None:
    """Stores the codes of a rotated row, rounded with its matrix; nothing if the scale is NaN."""
    n, x, codes = row_of(row)
    matrix = load_i64(row + Row.OUTER)
    if scale != scale:
        return
    wanted = x + 4 * n  # the kernel's scratch memory after the row
    for i in range(n):
        store_f32(wanted + 4 * i, load_f32(x + 4 * i))
    for i in range(n):
        code = clamped(nearest(load_f32(wanted + 4 * i) / scale) + zero_point, ZERO, LARGEST)
        if matrix:
            error = load_f32(x + 4 * i) - (code - zero_point) * scale
            line = matrix + 4 * n * i
            for j in range(i + 1, n):
                taken = error * load_f32(line + 4 * j)
                store_f32(wanted + 4 * j, load_f32(wanted + 4 * j) + taken)
        store_f32(x + 4 * i, code)
    pack_nibbles(x, n, codes)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(packed(declared.bits), _write)
