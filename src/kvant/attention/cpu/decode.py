"""The two kernels of an encoding: scores of a tile of keys, and weighted sums of a tile of values.

Compiled when a layer first needs the encoding, once, for every head size, then kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from kvant.attention.cpu.format import codes_of
from kvant.attention.cpu.inner import (
    TILE,
    expand_keys,
    expand_values,
    key_words,
    multiply,
    score_keys,
    weigh_values,
)  # fmt: skip
from kvant.attention.cpu.layout import Tile
from kvant.kernels.cpu.compiled import compiled
from kvant.kernels.cpu.vector import load_i64

FEW_ROWS = 12
"""Up to so many rows, codes are unpacked anew for every 6 of them; beyond, once into float32."""
_PITCH = 4 * TILE
_BASE, _STRIDE, _SLOTS, _ROW_WORDS, _HEAD_DIM, _ROWS = (
    int(f) for f in (Tile.BASE, Tile.STRIDE, Tile.SLOTS, Tile.ROW_WORDS, Tile.HEAD_DIM, Tile.ROWS)
)
_IN, _IN_PITCH, _OUT, _OUT_PITCH, _WORDS, _EXPANDED, _BLOCK_SCALES, _NANS = (
    int(f)
    for f in (
        Tile.IN, Tile.IN_PITCH, Tile.OUT, Tile.OUT_PITCH, Tile.WORDS, Tile.EXPANDED,
        Tile.BLOCK_SCALES, Tile.NANS,
    )
)  # fmt: skip


@cache
def row_kernel(write: Callable[[int, int], None]) -> Any:
    """void(row, _): stores one row; see `format.Kernels.write`."""
    return compiled(write)


@cache
def key_kernel(number: int) -> Any:
    """void(tile, _): tile's scores = q . keys, block scales applied, row scales not."""
    group = codes_of(number).group

    def keys(tile: int, _: int) -> None:
        base, stride = load_i64(tile + _BASE), load_i64(tile + _STRIDE)
        slots, row_words = load_i64(tile + _SLOTS), load_i64(tile + _ROW_WORDS)
        words, scales = load_i64(tile + _WORDS), load_i64(tile + _BLOCK_SCALES)
        nans = load_i64(tile + _NANS)
        for part in range(4):
            at, lane_slots = words + 64 * part, slots + 128 * part
            done = 0
            while row_words - done >= 16:
                key_words(16, number, base, stride, lane_slots, 4 * done, 16, at + _PITCH * done,
                          nans + 64 * part)  # fmt: skip
                done += 16
            if row_words - done >= 8:
                key_words(8, number, base, stride, lane_slots, 4 * done, 8, at + _PITCH * done,
                          nans + 64 * part)  # fmt: skip
                done += 8
            while row_words - done > 0:
                key_words(4, number, base, stride, lane_slots, 4 * done, row_words - done,
                          at + _PITCH * done, nans + 64 * part)  # fmt: skip
                done += 4
        groups = row_words // group
        rows, q, pitch = load_i64(tile + _ROWS), load_i64(tile + _IN), load_i64(tile + _IN_PITCH)
        out = load_i64(tile + _OUT)
        row = 0
        if rows > FEW_ROWS:
            expanded, depth = load_i64(tile + _EXPANDED), load_i64(tile + _HEAD_DIM)
            expand_keys(number, words, groups, scales, expanded)
            while row < rows:
                a, c = q + row * pitch, out + row * _PITCH
                left = rows - row
                if left >= 6:
                    multiply(6, 4, False, a, pitch, expanded, _PITCH, c, _PITCH, depth)
                    row += 6
                elif left >= 3:
                    multiply(3, 4, False, a, pitch, expanded, _PITCH, c, _PITCH, depth)
                    row += 3
                else:
                    multiply(1, 4, False, a, pitch, expanded, _PITCH, c, _PITCH, depth)
                    row += 1
            return
        while row < rows:
            a, c = q + row * pitch, out + row * _PITCH
            left = rows - row
            if left >= 6:
                score_keys(number, 6, a, pitch, words, groups, scales, c)
                row += 6
            elif left >= 4:
                score_keys(number, 4, a, pitch, words, groups, scales, c)
                row += 4
            elif left == 3:
                score_keys(number, 3, a, pitch, words, groups, scales, c)
                row += 3
            elif left == 2:
                score_keys(number, 2, a, pitch, words, groups, scales, c)
                row += 2
            else:
                score_keys(number, 1, a, pitch, words, groups, scales, c)
                row += 1

    return compiled(keys)


@cache
def value_kernel(number: int) -> Any:
    """void(tile, _): tile's sums += weights . values, block scales applied, row scales not."""
    bits = codes_of(number).bits

    def values(tile: int, _: int) -> None:
        base, stride = load_i64(tile + _BASE), load_i64(tile + _STRIDE)
        slots, head_dim = load_i64(tile + _SLOTS), load_i64(tile + _HEAD_DIM)
        scales = load_i64(tile + _BLOCK_SCALES)
        rows, weights = load_i64(tile + _ROWS), load_i64(tile + _IN)
        out, pitch = load_i64(tile + _OUT), load_i64(tile + _OUT_PITCH)
        expanded = load_i64(tile + _EXPANDED)
        scales_pitch = head_dim // 4  # 4 bytes for 16 numbers
        start = 0
        while start < head_dim:
            vectors = 4 if head_dim - start >= 64 else 2 if head_dim - start >= 32 else 1
            at, scale = base + start * bits // 8, scales + start // 4
            row = 0
            if rows > FEW_ROWS:
                to = expanded + 4 * start
                width = 4 * head_dim
                if vectors == 4:
                    expand_values(number, 4, at, stride, slots, scale, scales_pitch, to, width)
                elif vectors == 2:
                    expand_values(number, 2, at, stride, slots, scale, scales_pitch, to, width)
                else:
                    expand_values(number, 1, at, stride, slots, scale, scales_pitch, to, width)
                while row < rows:
                    a, c = weights + row * _PITCH, out + row * pitch + 4 * start
                    left = rows - row
                    if left >= 6:
                        if vectors == 4:
                            multiply(6, 4, True, a, _PITCH, to, width, c, pitch, TILE)
                        elif vectors == 2:
                            multiply(6, 2, True, a, _PITCH, to, width, c, pitch, TILE)
                        else:
                            multiply(6, 1, True, a, _PITCH, to, width, c, pitch, TILE)
                        row += 6
                    else:
                        if vectors == 4:
                            multiply(1, 4, True, a, _PITCH, to, width, c, pitch, TILE)
                        elif vectors == 2:
                            multiply(1, 2, True, a, _PITCH, to, width, c, pitch, TILE)
                        else:
                            multiply(1, 1, True, a, _PITCH, to, width, c, pitch, TILE)
                        row += 1
            while row < rows:
                a, c = weights + row * _PITCH, out + row * pitch + 4 * start
                left = rows - row
                if vectors == 4:
                    if left >= 6:
                        weigh_values(
                            number, 6, 4, a, at, stride, slots, scale, scales_pitch, c, pitch
                        )
                        row += 6
                    elif left >= 4:
                        weigh_values(
                            number, 4, 4, a, at, stride, slots, scale, scales_pitch, c, pitch
                        )
                        row += 4
                    elif left == 3:
                        weigh_values(
                            number, 3, 4, a, at, stride, slots, scale, scales_pitch, c, pitch
                        )
                        row += 3
                    elif left == 2:
                        weigh_values(
                            number, 2, 4, a, at, stride, slots, scale, scales_pitch, c, pitch
                        )
                        row += 2
                    else:
                        weigh_values(
                            number, 1, 4, a, at, stride, slots, scale, scales_pitch, c, pitch
                        )
                        row += 1
                elif vectors == 2:
                    if left >= 3:
                        weigh_values(
                            number, 3, 2, a, at, stride, slots, scale, scales_pitch, c, pitch
                        )
                        row += 3
                    else:
                        weigh_values(
                            number, 1, 2, a, at, stride, slots, scale, scales_pitch, c, pitch
                        )
                        row += 1
                elif left >= 3:
                    weigh_values(number, 3, 1, a, at, stride, slots, scale, scales_pitch, c, pitch)
                    row += 3
                else:
                    weigh_values(number, 1, 1, a, at, stride, slots, scale, scales_pitch, c, pitch)
                    row += 1
            start += 16 * vectors

    return compiled(values)
