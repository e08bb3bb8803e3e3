"""When an engine whose steps fail is given up: one rule for everybody who steps one for others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvant.errors import EngineFault

if TYPE_CHECKING:
    from kvant.engine.engine import Engine

MOST_FAILED_STEPS = 3
"""So many failed steps in a row mean that the device is broken, or the engine, not a request."""

_log = logging.getLogger(__name__)


class FailedSteps:
    """A failed step costs those who took part; `in_a_row` is set to 0 by whoever sees one succeed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.in_a_row = 0

    def survive(self, numbers: Iterable[int], tell: Callable[[int], None]) -> None:
        """To be called where a step's exception is handled: the engine has cancelled those who took part.

        numbers: of the requests that somebody waits for; `tell` is called with each that has ended.
        EngineFault if the engine cannot go on: its pages are wrong, or too many steps failed in a row.
        """
        self.in_a_row += 1
        _log.exception("a step failed")
        left = self._engine.numbers
        for number in [number for number in numbers if number not in left]:
            tell(number)
        self._engine.audit()
        if self.in_a_row >= MOST_FAILED_STEPS:
            raise EngineFault(f"{MOST_FAILED_STEPS} steps failed one after another")
