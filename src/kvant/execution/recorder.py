"""Recording what runs on a device, to be launched again as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Mark(Protocol):
    """A place in the device's work."""

    def record(self) -> None:
        """Set it behind all that has been launched."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has come there."""
        ...


class Recorder(Protocol):
    """What graphs need of a device."""

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A function that does again what `run` did, into the same tensors."""
        ...

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the host that the device can copy from and to by itself."""
        ...

    def mark(self) -> Mark: ...


class CudaRecorder:
    """CUDA graphs that share their memory: one runs at a time."""

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
            with torch.cuda.graph(graph, pool=self._pool):
                made = run()
        except BaseException:
            # Where ending the recording fails too, torch goes on with the stream that was recorded.
            torch.cuda.set_stream(current)
            raise
        return graph.replay, made

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype).pin_memory()

    def mark(self) -> Mark:
        event: Mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event
