"""int8_per_token_head: integers in units of a float32 scale per row."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from kvant.attention.cpu.arithmetic import (
    bound_row,
    clamped,
    clear_codes,
    largest_of,
    row_of,
    row_scale,
)
from kvant.attention.cpu.codes import wide
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.layout import Row
from kvant.kernels.cpu.vector import (
    FLOATS,
    I8,
    LANES,
    WORDS,
    load,
    load_f32,
    load_i64,
    nearest,
    store_f32,
    store_u8,
    words,
)
from kvant.kv.format import Encoding, KVFormat

_LARGEST = np.float32(Encoding.INT8.largest)


def _unpack(b: Any, x: Any) -> list[Any]:
    tops = [b.shl(x, words(24 - 8 * j)) for j in range(3)] + [x]
    return [b.sitofp(b.ashr(top, words(24)), FLOATS) for top in tops]


def _load(b: Any, address: Any) -> Any:
    stored = load(b, ir.VectorType(I8, LANES), address)
    return b.sitofp(b.sext(stored, WORDS), FLOATS)


def _write(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    bound_row(x, n)
    scale = row_scale(largest_of(x, n), _LARGEST)
    store_f32(load_i64(row + Row.SCALES), scale)
    if scale != scale:
        clear_codes(codes, n)
        return
    for i in range(n):
        step = clamped(nearest(load_f32(x + 4 * i) / scale), -_LARGEST, _LARGEST)
        store_u8(codes + i, int(step))


_INT8 = wide(8, _unpack, _load)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(_INT8, _write)
