"""Settings of a process that steps an engine: how its threads wait, and when Python collects garbage."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPINS = "1000"


def wait_without_spinning() -> None:
    """Makes OpenMP threads sleep after a short spin. Has an effect only before torch is imported.

    GNU OpenMP's threads spin for milliseconds at every barrier. If another process uses a core, they take
    time from the thread that they wait for. SmolLM2 on two cores beside two busy processes: 1.2 tokens/s
    with spinning, 4.4 without; on a quiet machine 14.9 and 15.0. A user's own setting is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


NEW_OBJECTS = 50_000
"""Objects allocated minus objects freed since the last collection that start the next collection."""


def search_rarely() -> None:
    """Exempts all existing objects from garbage collection, and collects new ones rarely.

    A full collection over all imported modules stops every answer for 50 ms. By default Python collects
    after 700 new objects. A step of a thousand sequences makes three times as many and the next step frees
    them, so every step would pay for a collection that finds nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


@contextmanager
def importing(*, owns_process: bool) -> Iterator[None]:
    """Stops garbage collection in this context, in which torch and transformers are imported.

    They make 700,000 objects that stay. Python would search all of them seven times, in 0.6 of a start's 5
    seconds. owns_process: the process belongs to Kvant, so later collections do not search them either.
    This has no effect if transformers is imported already.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if owns_process:
            gc.freeze()
        gc.enable()
