"""First launches of Triton kernels from several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.compiler import CompiledKernel


@contextmanager
def one_loads() -> Iterator[None]:
    """In this context, a launch waits while another thread loads the same kernel.

    Triton sets a compiled kernel's launcher before its function, and releases the interpreter in
    between, while the driver loads the code. A launch at that moment would have no function and
    raise TypeError, about once in many starts.
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
