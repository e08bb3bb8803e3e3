"""The clock of the host's part of a step."""

from __future__ import annotations

import time

import pytest
from benchmarks.rank_host import _Clock

from kvant.execution.recorder import CudaRecorder
from kvant.parallel.mirror import Sender
from kvant.parallel.ring import Ring
from kvant.parallel.watched import WatchedRecorder


class _Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        time.sleep(0.01)


def test_waits_of_every_recorders_marks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, name in ((Sender, "step"), (Ring, "send")):
        monkeypatch.setattr(changed, name, getattr(changed, name))  # put back at the end
    clock = _Clock()
    for kind in (CudaRecorder, WatchedRecorder):
        monkeypatch.setattr(kind, "mark", lambda _: _Event())
    clock.install()
    for kind in (CudaRecorder, WatchedRecorder):
        clock.spent.clear()
        mark = kind.__new__(kind).mark()
        mark.record()
        assert not clock.spent
        mark.synchronize()
        assert 0.01 <= clock.spent["wait"] < 1
