"""Waits for a GPU by polling, so that a wait ends when a rank is lost."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

import torch

from kvant.execution.recorder import CudaRecorder, Recorder
from kvant.execution.runner import ModelRunner

_NAP_SECONDS = 50e-6
"""Seconds for which ranks other than 0 sleep between two polls."""


class WatchedMark:
    """A `Mark` whose wait also ends when a rank is lost, since kernels that wait for it may never end."""

    def __init__(self, event: torch.cuda.Event, check: Callable[[], None], nap: float) -> None:
        self._event, self._check, self._nap = event, check, nap

    def record(self) -> None:
        self._event.record()

    def synchronize(self) -> None:
        """Waits for the mark; raises what `check` raises. Releases the interpreter lock between polls."""
        while not self._event.query():  # type: ignore[no-untyped-call]
            self._check()
            if self._nap:
                time.sleep(self._nap)
            else:  # a sleep of 0 s would take the kernel's timer slack, 50 us
                select.select((), (), (), 0)


class WatchedRecorder(CudaRecorder):
    """A `CudaRecorder` that makes `WatchedMark`s.

    nap: seconds between two polls. A core that slept runs slower for a while, so rank 0 polls with nap 0, as
    an engine without ranks does.
    """

    def __init__(self, device: torch.device, check: Callable[[], None], nap: float = 0.0) -> None:
        super().__init__(device)
        self._check, self._nap = check, nap

    def mark(self) -> WatchedMark:
        return WatchedMark(torch.cuda.Event(), self._check, self._nap)  # type: ignore[no-untyped-call]


class FollowingRunner(ModelRunner):
    """The runner of ranks other than 0. Its waits sleep, so that they take no time from rank 0's core."""

    def _recorder(self) -> Recorder:
        return WatchedRecorder(self.device, self.check, _NAP_SECONDS)
