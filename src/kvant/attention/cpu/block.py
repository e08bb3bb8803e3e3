"""What compiled code is handed: int64 fields at fixed places of one block of memory.

Addresses, counts, strides in bytes, float32 numbers as their bits.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.int64]


class Fields(IntEnum):
    """Members are the fields' offsets in bytes, in order; END, the last one, is the size."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return 8 * count


def block_of(fields: type[Fields], count: int = 1) -> Block:
    """Zeros on a cache line, one number a field, for `count` blocks behind each other."""
    size = count * int(fields["END"]) // 8
    room = np.zeros(size + 8, np.int64)
    start = -room.ctypes.data % 64 // 8
    return room[start : start + size]


def address(block: Block) -> int:
    return int(block.ctypes.data)


def float_bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))
