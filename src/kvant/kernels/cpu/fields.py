"""Arguments of compiled code: int64 fields at fixed offsets of one block of memory.

Fields hold addresses, counts, strides in bytes, and bits of float32 numbers. Plans import this module, so
it needs no numpy.
"""

from __future__ import annotations

from enum import IntEnum


class Fields(IntEnum):
    """Members are the fields' offsets in bytes, in order; END, the last one, is the size."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return 8 * count
