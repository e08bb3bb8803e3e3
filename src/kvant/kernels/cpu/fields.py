"""Arguments of compiled code: int64 fields at fixed offsets of one block of memory.

Fields hold addresses, counts, strides in bytes, and bits of float32 numbers. Plans import this module, so
it needs no numpy.
"""

from __future__ import annotations

from enum import IntEnum

LINE = 64
"""Bytes of a cache line."""


class Fields(IntEnum):
    """Members are the fields' offsets in bytes, in order; END, the last one, is the size.

    `auto()` follows the field before; a field that needs a cache line of its own gives its offset.
    """

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return last_values[-1] + 8 if last_values else 0
