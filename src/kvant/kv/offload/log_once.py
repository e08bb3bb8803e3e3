"""Logs each kind of fault once, because a fault of a disk or a network repeats with every page."""

from __future__ import annotations

import logging


class LogOnce:
    """Logs the first fault of each kind. Counters show the others."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: set[str] = set()

    def __call__(self, kind: str, text: str, *values: object, level: int = logging.WARNING) -> None:
        """Logs `text % values`, unless a fault of this kind was logged before."""
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._log.log(level, text, *values)
