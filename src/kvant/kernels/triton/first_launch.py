"""Triton's kernels where several threads launch them for the first time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.compiler import CompiledKernel


@contextmanager
def one_loads() -> Iterator[None]:
    """Inside, a thread that launches what another one is loading waits until it is loaded.

    Triton gives a compiled kernel its launcher first and its function after that, and lets go of the
    interpreter in between, while the driver loads the code. Whoever launches it meanwhile would do so
    without a function, which is a TypeError, once in many starts.
    """
    alone: Any = CompiledKernel.run
    loading = threading.Lock()

    def run(kernel: Any) -> Any:
        if kernel.function is None:
            with loading:
                if kernel.function is None:
                    kernel._init_handles()
        return kernel._run

    CompiledKernel.run = property(run)
    try:
        yield
    finally:
        CompiledKernel.run = alone
