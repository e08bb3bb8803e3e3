"""One file per format: how the CPU kernels decode and encode it.

The file has the name of the format's codec, and a function `kernels(declared)` that returns
`kvant.attention.cpu.format.Kernels`. A format without a file is refused. No torch or numba here: planning
asks which files exist.
"""

from __future__ import annotations

from importlib.util import find_spec

from kvant.kv.dtype import KVDtype

SERVED = frozenset(
    dtype
    for dtype in KVDtype
    if find_spec(f"{__name__}.{dtype.format.codec}") is not None and not dtype.format.device_only
)
"""Formats that the CPU kernels write and read."""
