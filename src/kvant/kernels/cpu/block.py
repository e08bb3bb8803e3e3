"""Memory for blocks of fields, and conversions of their values."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvant.kernels.cpu.fields import Fields

Block = NDArray[np.int64]


def block_of(fields: type[Fields], count: int = 1) -> Block:
    """Allocates `count` consecutive zeroed blocks, aligned to a cache line, with one number per field."""
    size = count * int(max(fields)) // 8  # the last field is END
    room = np.zeros(size + 8, np.int64)
    start = -room.ctypes.data % 64 // 8
    return room[start : start + size]


def address(block: Block) -> int:
    return int(block.ctypes.data)


def float_bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))
