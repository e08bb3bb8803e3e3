"""Every engine that a test makes or uses is audited when the test ends."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvant.engine.engine import Engine
    from kvant.scheduling.scheduler import Scheduler

_MODULE = "kvant.engine.engine"


class _Watch:
    """Knows engines weakly, and strongly only the scheduler of those that the test made.

    So an engine that was dropped before the test ended can still be audited, and no model is kept.
    """

    def __init__(self) -> None:
        self.is_watching = False
        self._engines: weakref.WeakKeyDictionary[Engine, tuple[int, ...]] = (
            weakref.WeakKeyDictionary()
        )
        self._made: list[Scheduler] = []

    def begin(self) -> None:
        """From the first test on that has the engine's module; importing it here would cost seconds."""
        module = sys.modules.get(_MODULE)
        if self.is_watching or module is None:
            return
        self.is_watching = True
        init = module.Engine.__init__

        def remember(engine: Engine, *args: object, **kwargs: object) -> None:
            init(engine, *args, **kwargs)
            self._add(engine)

        module.Engine.__init__ = remember

    def end(self) -> None:
        module = sys.modules.get(_MODULE)
        if module is not None and not self.is_watching:  # this test was the first to import it
            self.begin()
            for found in gc.get_objects():
                # Not isinstance: that asks objects for their class, and some of torch's warn then.
                if issubclass(type(found), module.Engine):
                    self._add(found)
        made, self._made = self._made, []
        alive = {id(engine.scheduler) for engine in self._engines}
        for scheduler in made:
            if id(scheduler) not in alive:
                faults = scheduler.audit()
                assert not faults, f"the page audit of a dropped engine found: {faults}"
        for engine in list(self._engines):
            self._audit(engine)

    def _add(self, engine: Engine) -> None:
        self._engines[engine] = ()
        self._made.append(engine.scheduler)

    def _audit(self, engine: Engine) -> None:
        stats = engine.stats
        now = (stats.num_steps, stats.num_running, stats.num_waiting, stats.num_held_pages)
        if self._engines[engine] == now:
            return  # nothing happened since its last audit
        self._engines[engine] = now
        engine.audit()
        if not engine.has_work:
            assert stats.num_held_pages == 0, "pages were not given back"


_WATCH = _Watch()


@pytest.fixture(autouse=True)
def audited() -> Iterator[None]:
    _WATCH.begin()
    yield
    _WATCH.end()
