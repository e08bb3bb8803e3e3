"""Python's cycle collector in a process that only steps an engine."""

from __future__ import annotations

import gc

NEW_OBJECTS = 50_000
"""Net new objects before a collection."""


def search_rarely() -> None:
    """Exempt all existing objects from collection, and collect new ones rarely.

    A full collection through all imports stops every answer for 50 ms. Python collects after 700 new
    objects by default; a step of a thousand sequences makes three times as many, which the next step
    frees, so every step would be searched in vain.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
