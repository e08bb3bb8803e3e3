"""Python's search for cycles that nobody holds, in a process that does nothing but step an engine."""

from __future__ import annotations

import gc

NEW_OBJECTS = 50_000
"""More of them than were freed again, before they are searched."""


def search_rarely() -> None:
    """Nothing that exists is looked at again, and what is new only once there is much of it.

    A search through all that was imported would stop every answer for 50 ms, again and again. New
    objects are searched after 700 by default; a step of a thousand sequences makes three times as many,
    which the next one frees, so that every step would be searched in vain.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
