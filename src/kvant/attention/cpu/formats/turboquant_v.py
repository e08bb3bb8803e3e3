"""turboquant_v4 and turboquant_v3: steps from the row's smallest number on, float16 scale and minimum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvant.attention.cpu.arithmetic import (
    NAN_BITS,
    ZERO,
    bound_row,
    clamped,
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
from kvant.kernels.cpu.vector import float_of, load_f32, load_i64, nearest, store_f16, store_f32
from kvant.kv.format import KVFormat


def _writer(bits: int) -> Callable[[int, int], None]:
    most, is_wide = np.float32((1 << bits) - 1), bits == 4

    def write(row: int, _: int) -> None:
        n, x, codes = row_of(row)
        scales = load_i64(row + Row.SCALES)
        bound_row(x, n)
        largest = largest_of(x, n)
        if largest != largest:
            store_f16(scales, float_of(NAN_BITS))
            store_f16(scales + 2, ZERO)
            clear_codes(codes, n // 2 if is_wide else n // 8 * 3)
            return
        low = high = load_f32(x)
        for i in range(n):
            low, high = min(low, load_f32(x + 4 * i)), max(high, load_f32(x + 4 * i))
        low = store_half(low, scales + 2)
        step = store_half(max(high - low, ZERO) / most, scales)
        for i in range(n):
            code = ZERO
            if step != ZERO:
                code = clamped(nearest((load_f32(x + 4 * i) - low) / step), ZERO, most)
            store_f32(x + 4 * i, code)
        if is_wide:
            pack_nibbles(x, n, codes)
        else:
            pack_threes(x, n, codes)

    return write


_WRITERS = {bits: _writer(bits) for bits in (3, 4)}


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(packed(declared.bits), _WRITERS[declared.bits])
