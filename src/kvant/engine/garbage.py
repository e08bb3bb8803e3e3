"""Python's search for unreachable cycles, in a process that only steps an engine."""

from __future__ import annotations

import gc

NEW_OBJECTS = 50_000
"""New objects, minus freed ones, before Python searches for cycles."""


def search_rarely() -> None:
    """Freeze existing objects and raise the threshold for new ones.

    A search through all imported objects would stop every answer for 50 ms, repeatedly. By default,
    Python searches after 700 new objects. A step of a thousand sequences creates three times as many, and
    the next step frees them, so each search would be useless.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
