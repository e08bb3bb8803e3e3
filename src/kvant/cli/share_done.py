"""Progress of commands that measure."""

from __future__ import annotations

import sys
import time


class ShareDone:
    """Share and time left, on stderr: one line that changes on a terminal, else a line every 10 %."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._start(0)

    def _start(self, total: int) -> None:
        self._begin, self._total, self._shown = time.monotonic(), total, -1.0

    def tell(self, done: int, total: int) -> None:
        if total != self._total:  # the next stage
            self._start(total)
        share = done / max(total, 1)
        if share < self._shown + (0.001 if self._terminal else 0.1):
            return
        self._shown = share
        spent = time.monotonic() - self._begin
        left = spent / share - spent if share else 0.0
        line = f"{share:4.0%} of {total:,} tokens, {left:.0f} s left"
        sys.stderr.write(f"\r{line}\033[K" if self._terminal else f"{line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        if self._terminal:
            sys.stderr.write("\r\033[K")
