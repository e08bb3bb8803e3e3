"""float32, float16 and bfloat16: numbers as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvant.attention.cpu.arithmetic import LARGEST_HALF, clamped, row_of
from kvant.attention.cpu.codes import wide
from kvant.attention.cpu.format import Kernels
from kvant.attention.cpu.layout import Real, Row
from kvant.kernels.cpu.vector import (
    FLOATS,
    HALVES,
    SHORTS,
    WORDS,
    load,
    load_f32,
    load_i64,
    load_u8,
    store_bf16,
    store_f16,
    store_f32,
    store_u8,
    words,
)
from kvant.kv.format import Encoding, KVFormat

_LARGEST_BFLOAT16 = np.float32(3.3895313892515355e38)


def _unpack_halves(b: Any, x: Any) -> list[Any]:
    halves = (b.trunc(x, SHORTS), b.trunc(b.lshr(x, words(16)), SHORTS))
    return [b.fpext(b.bitcast(half, HALVES), FLOATS) for half in halves]


def _unpack_bfloats(b: Any, x: Any) -> list[Any]:
    parts = (b.shl(x, words(16)), b.and_(x, words(0xFFFF0000)))
    return [b.bitcast(part, FLOATS) for part in parts]


def _load_bfloats(b: Any, address: Any) -> Any:
    wider = b.zext(load(b, SHORTS, address), WORDS)
    return b.bitcast(b.shl(wider, words(16)), FLOATS)


def _write_floats(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    for i in range(n):
        store_f32(codes + 4 * i, load_f32(x + 4 * i))


def _write_halves(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    if load_i64(row + Row.REAL) == Real.FLOAT16:
        given = load_i64(row + Row.X)
        for i in range(2 * n):
            store_u8(codes + i, load_u8(given + i))
        return
    for i in range(n):
        store_f16(codes + 2 * i, clamped(load_f32(x + 4 * i), -LARGEST_HALF, LARGEST_HALF))


def _write_bfloats(row: int, _: int) -> None:
    n, x, codes = row_of(row)
    if load_i64(row + Row.REAL) == Real.BFLOAT16:
        given = load_i64(row + Row.X)
        for i in range(2 * n):
            store_u8(codes + i, load_u8(given + i))
        return
    for i in range(n):
        number = clamped(load_f32(x + 4 * i), -_LARGEST_BFLOAT16, _LARGEST_BFLOAT16)
        store_bf16(codes + 2 * i, number)


_FLOATS = wide(32, lambda b, x: [b.bitcast(x, FLOATS)], lambda b, at: load(b, FLOATS, at))
_HALVES = wide(16, _unpack_halves, lambda b, at: b.fpext(load(b, HALVES, at), FLOATS))
_BFLOATS = wide(16, _unpack_bfloats, _load_bfloats)
_KERNELS = {
    Encoding.FLOAT32: Kernels(_FLOATS, _write_floats),
    Encoding.FLOAT16: Kernels(_HALVES, _write_halves),
    Encoding.BFLOAT16: Kernels(_BFLOATS, _write_bfloats),
}


def kernels(declared: KVFormat) -> Kernels:
    return _KERNELS[declared.encoding]
