"""What a recording that fails leaves behind, with torch's own context around streams that are not there."""

from __future__ import annotations

import contextlib
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
