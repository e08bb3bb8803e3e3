"""Recordings that fail, and objects that are freed while one is made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvant.execution.recorder import CudaRecorder


class Stream:
    def wait_stream(self, other: Stream) -> None: ...


class Graph:
    """Cannot be ended once anything went wrong, as on a device."""

    def capture_begin(self, *given: object, **options: object) -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_the_stream_that_was_current_is_so_again_after_a_recording_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, now = Stream(), []

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        now.append(stream)
        yield
        now.pop()

    fakes: dict[str, Any] = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda *_: Stream(),
        "current_stream": lambda: now[-1],
        "stream": on,
        "set_stream": now.append,
        "CUDAGraph": Graph,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    now.append(mine)
    runs = iter((None, ValueError("a step that looks at its numbers")))

    def run() -> None:
        fault = next(runs)
        if fault is not None:
            raise fault

    with pytest.raises(RuntimeError, match="previous error"):
        CudaRecorder(torch.device("cuda")).record(run)
    assert now[-1] is mine


@pytest.mark.gpu
def test_an_older_graph_is_not_freed_while_a_step_is_recorded() -> None:
    # An engine is full of cycles, so its graphs are freed by the collector: at any allocation.
    older: list[Any] = [
        CudaRecorder(torch.device("cuda")).record(lambda: torch.ones(4, device="cuda") * 2)
    ]
    older.append(older)
    del older
    rows, thresholds = torch.zeros(4, device="cuda"), gc.get_threshold()
    found: list[list[int]] = []

    def run() -> torch.Tensor:
        found.extend([i] for i in range(5000))  # enough for a collection of the oldest generation
        return rows + 1

    gc.set_threshold(10, 2, 2)
    try:
        replay, made = CudaRecorder(torch.device("cuda")).record(run)
    finally:
        gc.set_threshold(*thresholds)
    rows += 1
    replay()
    assert made.tolist() == [2.0] * 4
