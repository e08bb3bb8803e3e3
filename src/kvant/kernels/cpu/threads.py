"""Runs Kvant's loops on torch's threads: a second thread pool would compete for the cores.

Torch on Linux includes GNU OpenMP, whose entry point GOMP_parallel(function, data, threads, flags)
runs a C function on the threads that torch's operators use and keep warm.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

_log = logging.getLogger(__name__)


@cache
def openmp_address(name: str) -> int:
    """Returns the address of a function in the OpenMP library that torch loaded; 0 without GNU OpenMP."""
    for path in [*Path(torch.__file__).parent.glob("lib/libgomp*.so*"), Path("libgomp.so.1")]:
        try:
            library = ctypes.CDLL(str(path))
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        if address:
            return address
    return 0


@cache
def parallel_address() -> int:
    """Returns the address of GOMP_parallel(function, data, threads, flags).

    0, logged once, for one thread.
    """
    address = openmp_address("GOMP_parallel")
    if not address and torch.get_num_threads() > 1:
        _log.warning(
            "this torch brings no GNU OpenMP: attention and models run in one thread on CPUs"
        )
    return address
