"""What compiled code is handed: int64 fields at fixed places of one block of memory."""

from __future__ import annotations

from enum import IntEnum, auto

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.int64]


class _Fields(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return 8 * count


class Product(_Fields):
    """A product out[ROWS, OUTPUTS] = x[ROWS, COLUMNS] . weight. Addresses, counts, strides in bytes."""

    NEXT = auto()  # dealt out while running
    TICKET = auto()
    WORKER = auto()
    WEIGHT = auto()
    STRIDE = auto()
    SCALES = auto()  # 0 without
    SCALES_STRIDE = auto()
    BIAS = auto()  # 0 without
    OUTPUTS = auto()
    COLUMNS = auto()
    CHUNK = auto()  # outputs that a thread takes at a time
    X = auto()
    X_STRIDE = auto()
    OUT = auto()
    OUT_STRIDE = auto()
    ROWS = auto()
    SCRATCH = auto()
    SCRATCH_STRIDE = auto()
    END = auto()


def block_of(fields: type[_Fields]) -> Block:
    """Zeros on a cache line, one number a field."""
    size = len(fields)
    room = np.zeros(size + 8, np.int64)
    start = -room.ctypes.data % 64 // 8
    return room[start : start + size]


def address(block: Block) -> int:
    return int(block.ctypes.data)
