"""What compiled code is handed: int64 fields at fixed places of one block of memory.

Addresses, counts, strides in bytes, float32 numbers as their bits. Plans import this: no numpy here.
"""

from __future__ import annotations

from enum import IntEnum


class Fields(IntEnum):
    """Members are the fields' offsets in bytes, in order; END, the last one, is the size."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return 8 * count
