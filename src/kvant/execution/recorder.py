"""Records the work that a function launches on a device, so that one launch repeats it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Mark(Protocol):
    """A point in the device's queue of work."""

    def record(self) -> None:
        """Places the mark after all work that was launched so far."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has reached the mark."""
        ...


class Recorder(Protocol):
    """Records functions, and makes the pinned buffers and marks of their inputs and results."""

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Returns a function that repeats `run` into the same tensors, and what `run` returned."""
        ...

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros [*shape] in pinned host memory."""
        ...

    def mark(self) -> Mark: ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, so only one of them may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # kernels are compiled and libraries set up outside of the graph
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_collections(), torch.cuda.graph(graph, pool=self._pool):
                made = run()
        except BaseException:
            # If ending the recording fails too, torch stays on the recorded stream.
            torch.cuda.set_stream(current)
            raise
        return graph.replay, made

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype).pin_memory()

    def mark(self) -> Mark:
        event: Mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event


@contextmanager
def _no_collections() -> Iterator[None]:
    """Stops garbage collection: freeing an older engine's graphs would abort the recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
