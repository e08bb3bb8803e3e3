"""Settings of a process that steps an engine: how its threads wait, and when Python collects garbage."""

from __future__ import annotations

import gc
import os

_SPINS = "1000"


def wait_without_spinning() -> None:
    """Let OpenMP threads sleep after a short spin; works only before torch is imported.

    GNU OpenMP's threads spin for milliseconds at every barrier. If another process has a core,
    they take time from the thread that they wait for. SmolLM2 on two cores beside two busy processes:
    1.2 tokens/s with spinning, 4.4 without; on a quiet machine 14.9 and 15.0. A value that the user
    has set is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


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
