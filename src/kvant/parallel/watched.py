"""Waits for a GPU that end when a rank is lost, and do not spin."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvant.execution.recorder import CudaRecorder, Recorder
from kvant.execution.runner import ModelRunner

_NAP_SECONDS = 50e-6
"""How long other ranks sleep between two looks."""


class WatchedMark:
    """A `Mark` whose wait ends with the loss of a rank, too: kernels that wait for it may never end."""

    def __init__(self, event: torch.cuda.Event, check: Callable[[], None], nap: float) -> None:
        self._event, self._check, self._nap = event, check, nap

    def record(self) -> None:
        self._event.record()

    def synchronize(self) -> None:
        """Raises what `check` raises. Other threads may run meanwhile."""
        while not self._event.query():  # type: ignore[no-untyped-call]
            self._check()
            time.sleep(self._nap)


class WatchedRecorder(CudaRecorder):
    """A `CudaRecorder` that makes `WatchedMark`s.

    nap: seconds between two looks. A processor that sleeps runs slower for a while after it: 0 keeps rank 0's
    awake, as waiting for a device does without ranks.
    """

    def __init__(self, device: torch.device, check: Callable[[], None], nap: float = 0.0) -> None:
        super().__init__(device)
        self._check, self._nap = check, nap

    def mark(self) -> WatchedMark:
        return WatchedMark(torch.cuda.Event(), self._check, self._nap)  # type: ignore[no-untyped-call]


class FollowingRunner(ModelRunner):
    """Another rank's part. Its waits sleep: a core that spins may share its time with rank 0's."""

    def _recorder(self) -> Recorder:
        return WatchedRecorder(self.device, self.check, _NAP_SECONDS)
