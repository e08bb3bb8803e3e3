"""Writers: encode one row of numbers as the format's codec defines it.

Every operation is one IEEE float32 operation, in the order of `kvant.kv.codecs`; nothing here may be
compiled with fast-math.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit

from kvant.attention.cpu.decode import SIGNATURE
from kvant.attention.cpu.layout import Form, Real, Row
from kvant.attention.cpu.rotate import rotate_in_place
from kvant.kernels.cpu.compiled import compiled
from kvant.kernels.cpu.vector import (
    bits_of,
    float_of,
    load_f16,
    load_f32,
    load_i64,
    load_u8,
    nearest,
    root,
    store_bf16,
    store_f16,
    store_f32,
    store_i32,
    store_u8,
)
from kvant.kv.codecs import CLAMP
from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT, middles
from kvant.kv.codecs.conversion import MIN_ROW_SCALE

_X, _REAL, _DIM, _NUMBERS, _CODES, _SCALES, _OUTER, _E4M3 = (
    int(f) for f in (
        Row.X, Row.REAL, Row.HEAD_DIM, Row.NUMBERS, Row.CODES, Row.SCALES, Row.OUTER, Row.E4M3
    )
)  # fmt: skip
_FLOAT16, _BFLOAT16 = int(Real.FLOAT16), int(Real.BFLOAT16)
_BOUND = np.float32(CLAMP)
_LEAST = np.float32(MIN_ROW_SCALE)
_ZERO, _HALF, _ONE, _TWO, _FOUR = (np.float32(n) for n in (0, 0.5, 1, 2, 4))
_SIX, _FIFTEEN = np.float32(6), np.float32(15)
_INT8_MAX, _E4M3_MAX, _HALF_MAX = np.float32(127), np.float32(448), np.float32(65504)
_BRAIN_MAX = np.float32(3.3895313892515355e38)
_NAN = 0x7FC00000


@njit(inline="always")
def _clamped(x: Any, low: Any, high: Any) -> Any:
    """NaN stays NaN."""
    if x < low:
        x = low
    if x > high:
        x = high
    return x


@njit(inline="always")
def _bound_row(x: int, n: int) -> None:
    for i in range(n):
        store_f32(x + 4 * i, _clamped(load_f32(x + 4 * i), -_BOUND, _BOUND))


@njit(inline="always")
def _largest(x: int, n: int) -> Any:
    """Largest magnitude; NaN if there is one (its bits are above every number's)."""
    found = 0
    for i in range(n):
        found = max(found, bits_of(load_f32(x + 4 * i)) & 0x7FFFFFFF)
    return float_of(found)


@njit(inline="always")
def _row_scale(span: Any, steps: Any) -> Any:
    """span / steps, at least the smallest normal; every NaN the one."""
    if span != span:
        return float_of(_NAN)
    return max(span / steps, _LEAST)


@njit(inline="always")
def _e4m3(x: Any) -> int:
    """Nearest e4m3fn code, ties to even, saturating at 448; NaN is 0x7f."""
    bits = bits_of(x)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # Below 2^-6 steps are 2^-9; 2^14 has such steps, so adding it rounds to them.
    small = bits_of(float_of(size) + np.float32(16384)) - 0x46800000
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = small if size < 0x3C800000 else normal
    code = 0x7E if size >= 0x43E00000 else code
    return 0x7F if size > 0x7F800000 else sign | code


@njit(inline="always")
def _e5m2(x: Any) -> int:
    """Nearest e5m2 code, ties to even, saturating at 57344; NaN is 0x7f."""
    bits = bits_of(x)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    # Below 2^-14 steps are 2^-16, those of 2^7.
    small = bits_of(float_of(size) + np.float32(128)) - 0x43000000
    normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - (112 << 2)
    code = small if size < 0x38800000 else normal
    code = 0x7B if size >= 0x47600000 else code
    return 0x7F if size > 0x7F800000 else sign | code


@njit(inline="always")
def _e2m1(x: Any) -> int:
    """Nearest e2m1 code, ties to even, saturating at 6. No NaN."""
    size = abs(x)
    code = nearest(min(size * _TWO, _FOUR))
    code += nearest(_clamped(size - _TWO, _ZERO, _TWO))
    code += nearest(_clamped((size - _FOUR) * _HALF, _ZERO, _ONE))
    return int(code) | ((bits_of(x) >> 28) & 8)


@njit(inline="always")
def _pack_nibbles(x: int, n: int, codes: int) -> None:
    """Integers 0..15 in float32, two a byte, even ones low."""
    for i in range(n // 2):
        low, high = int(load_f32(x + 8 * i)), int(load_f32(x + 8 * i + 4))
        store_u8(codes + i, low | (high << 4))


def _float32(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    for i in range(n):
        store_f32(codes + 4 * i, load_f32(x + 4 * i))


def _float16(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    if load_i64(row + _REAL) == _FLOAT16:
        given = load_i64(row + _X)
        for i in range(2 * n):
            store_u8(codes + i, load_u8(given + i))
        return
    for i in range(n):
        store_f16(codes + 2 * i, _clamped(load_f32(x + 4 * i), -_HALF_MAX, _HALF_MAX))


def _bfloat16(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    if load_i64(row + _REAL) == _BFLOAT16:
        given = load_i64(row + _X)
        for i in range(2 * n):
            store_u8(codes + i, load_u8(given + i))
        return
    for i in range(n):
        store_bf16(codes + 2 * i, _clamped(load_f32(x + 4 * i), -_BRAIN_MAX, _BRAIN_MAX))


def _scaled_e4m3(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    outer = float_of(load_i64(row + _OUTER))
    _bound_row(x, n)
    for i in range(n):
        store_u8(codes + i, _e4m3(load_f32(x + 4 * i) / outer))


def _plain_e5m2(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    _bound_row(x, n)
    for i in range(n):
        store_u8(codes + i, _e5m2(load_f32(x + 4 * i)))


def _row_e4m3(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    _bound_row(x, n)
    scale = _row_scale(_largest(x, n), _E4M3_MAX)
    for i in range(n):
        store_u8(codes + i, _e4m3(load_f32(x + 4 * i) / scale))
    store_f32(load_i64(row + _SCALES), scale)


def _row_int8(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    _bound_row(x, n)
    scale = _row_scale(_largest(x, n), _INT8_MAX)
    store_f32(load_i64(row + _SCALES), scale)
    if scale != scale:
        for i in range(n):
            store_u8(codes + i, 0)
        return
    for i in range(n):
        step = _clamped(nearest(load_f32(x + 4 * i) / scale), -_INT8_MAX, _INT8_MAX)
        store_u8(codes + i, int(step))


def _row_int4(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    _bound_row(x, n)
    rotate_in_place(x, n)
    low = high = _ZERO
    for i in range(n):
        y = load_f32(x + 4 * i)
        low, high = min(low, y), max(high, y)
    largest = _largest(x, n)
    if largest != largest:
        store_i32(load_i64(row + _SCALES), _NAN)
        for i in range(n // 2):
            store_u8(codes + i, 0)
        return
    bits = bits_of(_row_scale(high - low, _FIFTEEN))
    bits = (bits + (1 << 12)) & ~((1 << 13) - 1)  # 11 significant bits
    scale = float_of(bits)
    zero_point = _clamped(nearest(-low / scale), _ZERO, _FIFTEEN)
    for i in range(n):
        code = nearest(load_f32(x + 4 * i) / scale) + zero_point
        store_f32(x + 4 * i, _clamped(code, _ZERO, _FIFTEEN))
    _pack_nibbles(x, n, codes)
    store_i32(load_i64(row + _SCALES), bits | int(zero_point))


def _block_e2m1(row: int, _: int) -> None:
    n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
    outer, numbers = float_of(load_i64(row + _OUTER)), load_i64(row + _E4M3)
    _bound_row(x, n)
    for block in range(n // 16):
        start = x + 64 * block
        largest = _largest(start, 16)
        scale = _e4m3(largest / _SIX / outer)
        if scale == 0 and largest > _ZERO:
            scale = 1  # 2^-9
        store_u8(load_i64(row + _SCALES) + block, scale)
        step = load_f32(numbers + 4 * scale) * outer
        for i in range(8):
            code = 0
            if step > _ZERO:
                code = _e2m1(load_f32(start + 8 * i) / step)
                code |= _e2m1(load_f32(start + 8 * i + 4) / step) << 4
            store_u8(codes + 8 * block + i, code)


@njit(inline="always")
def _half(x: Any, place: int) -> Any:
    """Store x as float16, saturating; what it became. A zero is never negative."""
    x = _clamped(x, -_HALF_MAX, _HALF_MAX)
    store_f16(place, x)
    x = load_f16(place)
    if x == _ZERO:
        store_f16(place, _ZERO)
    return x


@njit
def _sum_of_squares(x: int, n: int, sums: int) -> Any:
    """Neighbours, then neighbours of these; sums: scratch [n]."""
    for i in range(n):
        store_f32(sums + 4 * i, load_f32(x + 4 * i) * load_f32(x + 4 * i))
    while n > 1:
        half = n // 2
        for i in range(half):
            store_f32(sums + 4 * i, load_f32(sums + 8 * i) + load_f32(sums + 8 * i + 4))
        if n % 2:
            store_f32(sums + 4 * half, load_f32(sums + 4 * (n - 1)))
        n = half + n % 2
    return load_f32(sums)


@njit(inline="always")
def _pack_threes(x: int, n: int, codes: int) -> None:
    """Integers 0..7 in float32, eight in three bytes."""
    for i in range(n // 8):
        word = 0
        for j in range(8):
            word |= int(load_f32(x + 32 * i + 4 * j)) << (3 * j)
        for j in range(3):
            store_u8(codes + 3 * i + j, (word >> (8 * j)) & 0xFF)


def _codebook(centroids: tuple[float, ...]) -> Callable[[int, int], None]:
    """Writer of rotated rows in a codebook; see `kvant.kv.codecs.turboquant_k`."""
    levels = tuple(np.float32(c) for c in centroids[: len(centroids) // 2])
    bounds = tuple(np.float32(m) for m in middles(centroids))
    signed, is_wide = len(levels), len(levels) == 8

    def write(row: int, _: int) -> None:
        n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
        scales, sums = load_i64(row + _SCALES), x + 4 * n
        _bound_row(x, n)
        largest = _largest(x, n)
        if largest != largest:
            store_f16(scales, float_of(_NAN))
            for i in range(n // 2 if is_wide else n // 8 * 3):
                store_u8(codes + i, 0)
            return
        unit = max(float_of(bits_of(largest) & 0x7F800000), _LEAST)
        for i in range(n):
            store_f32(x + 4 * i, load_f32(x + 4 * i) / unit)
        rotate_in_place(x, n)
        length = root(_sum_of_squares(x, n, sums))
        wide = np.float32(np.sqrt(float(n)))
        found = sums + 4 * n
        for i in range(n):
            z = _ZERO
            if length != _ZERO:
                z = (load_f32(x + 4 * i) * wide) / length
            size, code = abs(z), 0
            for bound in bounds:
                code += size > bound
            store_f32(found + 4 * i, levels[code])
            store_f32(x + 4 * i, np.float32(code + (signed if z < _ZERO else 0)))
        if is_wide:
            _pack_nibbles(x, n, codes)
        else:
            _pack_threes(x, n, codes)
        _half((length / root(_sum_of_squares(found, n, sums))) * unit, scales)

    return write


def _smallest(bits: int) -> Callable[[int, int], None]:
    """Writer of steps from the smallest number on; see `kvant.kv.codecs.turboquant_v`."""
    most, is_wide = np.float32((1 << bits) - 1), bits == 4

    def write(row: int, _: int) -> None:
        n, x, codes = load_i64(row + _DIM), load_i64(row + _NUMBERS), load_i64(row + _CODES)
        scales = load_i64(row + _SCALES)
        _bound_row(x, n)
        largest = _largest(x, n)
        if largest != largest:
            store_f16(scales, float_of(_NAN))
            store_f16(scales + 2, _ZERO)
            for i in range(n // 2 if is_wide else n // 8 * 3):
                store_u8(codes + i, 0)
            return
        low = high = load_f32(x)
        for i in range(n):
            low, high = min(low, load_f32(x + 4 * i)), max(high, load_f32(x + 4 * i))
        low = _half(low, scales + 2)
        step = _half(max(high - low, _ZERO) / most, scales)
        for i in range(n):
            code = _ZERO
            if step != _ZERO:
                code = _clamped(nearest((load_f32(x + 4 * i) - low) / step), _ZERO, most)
            store_f32(x + 4 * i, code)
        if is_wide:
            _pack_nibbles(x, n, codes)
        else:
            _pack_threes(x, n, codes)

    return write


_WRITERS: dict[Form, Callable[[int, int], None]] = {
    Form.FLOAT32: _float32,
    Form.FLOAT16: _float16,
    Form.BFLOAT16: _bfloat16,
    Form.E4M3: _scaled_e4m3,
    Form.E5M2: _plain_e5m2,
    Form.E4M3_ROW: _row_e4m3,
    Form.INT8_ROW: _row_int8,
    Form.INT4_ROW: _row_int4,
    Form.NVFP4: _block_e2m1,
    Form.CODEBOOK4: _codebook(CENTROIDS_4BIT),
    Form.CODEBOOK3: _codebook(CENTROIDS_3BIT),
    Form.SMALLEST4: _smallest(4),
    Form.SMALLEST3: _smallest(3),
}


@cache
def row_kernel(form: Form) -> Any:
    """void(row, _): store one row's codes and scales; see `Row`."""
    return compiled(_WRITERS[form], SIGNATURE)
