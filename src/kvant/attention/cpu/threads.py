"""Torch's own threads, for our loops: a second pool beside them would fight it for the cores.

Torch on Linux brings GNU OpenMP, whose entry point GOMP_parallel(function, data, threads, flags)
runs a C function on its threads, those that torch's operators use and keep warm.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def openmp_address(name: str) -> int:
    """The address of a function in the library that torch loaded; 0 where there is no GNU OpenMP."""
    for path in [*Path(torch.__file__).parent.glob("lib/libgomp*.so*"), Path("libgomp.so.1")]:
        try:
            library = ctypes.CDLL(str(path))
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
        if address:
            return address
    return 0


def parallel_address() -> int:
    """Of GOMP_parallel(function, data, threads, flags)."""
    return openmp_address("GOMP_parallel")
