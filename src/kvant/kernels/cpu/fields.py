"""Arguments of compiled code: int64 fields at fixed offsets of one block of memory.

Fields hold addresses, counts, strides in bytes, and bits of float32 numbers. Plans import this module, so
it needs no numpy.
"""

from __future__ import annotations

from collections import namedtuple
from enum import IntEnum
from typing import Any, TypeVar, cast

Kind = TypeVar("Kind", bound=IntEnum)

LINE = 64
"""Bytes of a cache line."""


class Fields(IntEnum):
    """Members are the fields' offsets in bytes, in order; END, the last one, is the size.

    `auto()` continues after the previous field; a field that needs a separate cache line gives its offset.
    """

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return last_values[-1] + 8 if last_values else 0


def plain(kind: type[Kind]) -> type[Kind]:
    """Returns the members as plain ints: attributes of a named tuple, which numba compiles as constants."""
    members = kind.__members__
    made: Any = namedtuple(kind.__name__, members)  # type: ignore[misc]
    return cast(type[Kind], made(*map(int, members.values())))
