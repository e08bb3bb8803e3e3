"""fp8_per_token_head: e4m3 in units of a float32 scale per row."""

from __future__ import annotations

import numpy as np

from kvant.attention.cpu.arithmetic import (
    bound_row,
    e4m3_code,
    largest_of,
    row_of,
    row_scale,
)
from kvant.attention.cpu.codes import E4M3, E4M3_FACTOR
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.layout import Row
from kvant.kernels.cpu.vector import load_f32, load_i64, store_f32, store_u8
from kvant.kv.format import Encoding, KVFormat

_LARGEST = np.float32(Encoding.E4M3FN.largest)


def _write(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    bound_row(x, n)
    scale = row_scale(largest_of(x, n), _LARGEST)
    for i in range(n):
        store_u8(codes + i, e4m3_code(load_f32(x + 4 * i) / scale))
    store_f32(load_i64(row + Row.SCALES), scale)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(E4M3, _write, E4M3_FACTOR)
