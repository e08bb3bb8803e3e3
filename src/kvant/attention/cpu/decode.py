"""The two kernels of an encoding: scores of a tile of keys, and weighted sums of a tile of values.

The first layer that needs an encoding compiles its kernels, once for all head sizes; they are cached on disk.
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
"""Maximum number of rows for which codes are unpacked per 6 rows; for more rows, once into float32."""
_PITCH = 4 * TILE


@cache
def row_kernel(write: Callable[[int, int], None]) -> Any:
    """Compiles void(row, _), which stores one row; see `format.Kernels.write`."""
    return compiled(write)


@cache
def key_kernel(number: int) -> Any:
    """Compiles void(tile, _): the tile's scores = q . keys, with block scales and without row scales."""
    group = codes_of(number).group

    def keys(tile: int, _: int) -> None:
        base = load_i64(tile + Tile.BASE)
        slots, row_words = load_i64(tile + Tile.SLOTS), load_i64(tile + Tile.ROW_WORDS)
        words, scales = load_i64(tile + Tile.WORDS), load_i64(tile + Tile.BLOCK_SCALES)
        nans = load_i64(tile + Tile.NANS)
        for part in range(4):
            at, lane_slots = words + 64 * part, slots + 128 * part
            done = 0
            while row_words - done >= 16:
                key_words(16, number, base, lane_slots, 4 * done, 16, at + _PITCH * done,
                          nans + 64 * part)  # fmt: skip
                done += 16
            if row_words - done >= 8:
                key_words(8, number, base, lane_slots, 4 * done, 8, at + _PITCH * done,
                          nans + 64 * part)  # fmt: skip
                done += 8
            while row_words - done > 0:
                key_words(4, number, base, lane_slots, 4 * done, row_words - done,
                          at + _PITCH * done, nans + 64 * part)  # fmt: skip
                done += 4
        groups = row_words // group
        rows, q, pitch = (
            load_i64(tile + Tile.ROWS),
            load_i64(tile + Tile.IN),
            load_i64(tile + Tile.IN_PITCH),
        )
        out = load_i64(tile + Tile.OUT)
        if rows > FEW_ROWS:
            expanded, depth = load_i64(tile + Tile.EXPANDED), load_i64(tile + Tile.HEAD_DIM)
            expand_keys(number, words, groups, scales, expanded)
            multiply(4, False, rows, q, pitch, expanded, _PITCH, out, _PITCH, depth)
        else:
            score_keys(number, rows, q, pitch, words, groups, scales, out)

    return compiled(keys)


@cache
def value_kernel(number: int) -> Any:
    """Compiles void(tile, _): the tile's sums += weights . values, with block scales, without row scales."""
    bits = codes_of(number).bits

    def values(tile: int, _: int) -> None:
        base = load_i64(tile + Tile.BASE)
        slots, head_dim = load_i64(tile + Tile.SLOTS), load_i64(tile + Tile.HEAD_DIM)
        scales = load_i64(tile + Tile.BLOCK_SCALES)
        rows, weights = load_i64(tile + Tile.ROWS), load_i64(tile + Tile.IN)
        out, pitch = load_i64(tile + Tile.OUT), load_i64(tile + Tile.OUT_PITCH)
        expanded = load_i64(tile + Tile.EXPANDED)
        scales_pitch = head_dim // 4  # 4 bytes for 16 numbers
        start = 0
        while start < head_dim:
            at, scale = base + start * bits // 8, scales + start // 4
            c, to, width = out + 4 * start, expanded + 4 * start, 4 * head_dim
            left = head_dim - start
            if left >= 64:
                if rows > FEW_ROWS:
                    expand_values(number, 4, at, slots, scale, scales_pitch, to, width)
                    multiply(4, True, rows, weights, _PITCH, to, width, c, pitch, TILE)
                else:
                    weigh_values(number, 4, rows, weights, at, slots, scale, scales_pitch, c,
                                 pitch)  # fmt: skip
                start += 64
            elif left >= 32:
                if rows > FEW_ROWS:
                    expand_values(number, 2, at, slots, scale, scales_pitch, to, width)
                    multiply(2, True, rows, weights, _PITCH, to, width, c, pitch, TILE)
                else:
                    weigh_values(number, 2, rows, weights, at, slots, scale, scales_pitch, c,
                                 pitch)  # fmt: skip
                start += 32
            else:
                if rows > FEW_ROWS:
                    expand_values(number, 1, at, slots, scale, scales_pitch, to, width)
                    multiply(1, True, rows, weights, _PITCH, to, width, c, pitch, TILE)
                else:
                    weigh_values(number, 1, rows, weights, at, slots, scale, scales_pitch, c,
                                 pitch)  # fmt: skip
                start += 16

    return compiled(values)
