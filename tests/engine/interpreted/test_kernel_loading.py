"""Threads that launch one compiled kernel at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.compiler import CompiledKernel
from triton.compiler import compiler as triton_compiler

from kvant.kernels.triton.first_launch import one_loads

FUNCTION = 17


class Driver:
    """Loads a kernel only when it is told to go on, as one may that reads a large one."""

    def __init__(self) -> None:
        self.is_loading, self.goes_on = threading.Event(), threading.Event()
        self.num_loads = 0
        self.utils = SimpleNamespace(load_binary=self.load)

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> object:
        return SimpleNamespace(warp_size=32)

    def launcher_cls(self, source: object, metadata: object) -> object:
        return "launcher"

    def load(self, *given: object) -> tuple[object, int, int, int, int]:
        self.num_loads += 1
        self.is_loading.set()
        assert self.goes_on.wait(10)
        return "module", FUNCTION, 0, 0, 1024


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(triton_compiler, "driver", SimpleNamespace(active=made))
    monkeypatch.setattr(triton_compiler, "max_shared_mem", lambda device: 1 << 17)
    return made


@pytest.fixture
def kernel() -> Iterator[Any]:
    """Compiled, and not loaded yet."""
    made = CompiledKernel.__new__(CompiledKernel)
    made.module = made.function = made._run = None
    made.src, made.name, made.kernel, made.metadata_group, made.hash = None, "k", b"", {}, "0"
    made.metadata = SimpleNamespace(shared=0, num_warps=4, warp_size=32)
    yield made
    made.module = None  # nothing that could be unloaded


def launched(kernel: Any) -> tuple[object, object]:
    """What Triton launches, in the order in which it asks."""
    return kernel.run, kernel.function


def test_a_launch_waits_while_another_thread_loads_the_kernel(driver: Driver, kernel: Any) -> None:
    with one_loads(), ThreadPoolExecutor(2) as threads:
        first = threads.submit(launched, kernel)
        assert driver.is_loading.wait(10)
        second = threads.submit(launched, kernel)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        driver.goes_on.set()
        assert first.result() == second.result() == ("launcher", FUNCTION)
    assert driver.num_loads == 1


def test_a_kernel_that_cannot_be_loaded_fails_every_launch(driver: Driver, kernel: Any) -> None:
    kernel.metadata.shared = 1 << 20
    with one_loads():
        for _ in range(2):
            with pytest.raises(Exception, match="shared memory"):
                launched(kernel)


def test_afterwards_triton_is_as_it_was(driver: Driver, kernel: Any) -> None:
    before = CompiledKernel.run
    with pytest.raises(ZeroDivisionError), one_loads():
        raise ZeroDivisionError
    assert CompiledKernel.run is before
