"""Launch shapes: how large the tiles are, and into how many items a batch is cut."""

from __future__ import annotations

from dataclasses import dataclass

from kvant.attention.triton.codec import READING, Kind
from kvant.kv.dtype import KVDtype


@dataclass(frozen=True, slots=True)
class Shape:
    """How one launch of the attention kernel is cut.

    rows: query rows (query, head of the group) of a program. tile: keys of one iteration.
    least: shortest stretch of keys, in tiles. waves: items aimed at, in programs per multiprocessor.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    least: int
    waves: int
    max_registers: int | None = None


NEVER_SPLIT = 1 << 24
"""A `least` no sequence reaches."""


def shape_for(k: KVDtype, v: KVDtype, head_dim: int, rows: int, *, full: bool) -> Shape:
    """The shape for `rows` query rows of one sequence and KV head. full: float32 products."""
    wide = max(READING[k].word.itemsize, 4 if full else 0) >= 4 or head_dim > 256
    native = READING[k].elements == 1
    if rows <= 16:
        if wide:
            return Shape(16, 16, 4, 2, 8, 8)
        if head_dim > 128:
            return Shape(16, 32, 2, 2, 4, 12)
        return Shape(16, 32, 1, 3, 4, 24)
    if rows <= 32:
        return Shape(32, 16 if wide else 32, 4, 2, 4, 12)
    if rows <= 64 or wide or head_dim > 128 or READING[v].kind is Kind.E2M1 or not native:
        return Shape(64, 16 if wide else 64, 4, 2, 4, 8)
    return Shape(128, 64, 8, 3, 4, 8)
