"""One file per format: how Triton kernels load, decode and encode it.

The file has the name of the format's codec, and a function `kernels(declared)` that returns
`kvant.attention.triton.format.Kernels`. A format without a file is refused. No torch or Triton here:
planning asks which files exist.
"""

from __future__ import annotations

from importlib.util import find_spec

from kvant.kv.dtype import KVDtype


def has_kernels(dtype: KVDtype) -> bool:
    return find_spec(f"{__name__}.{dtype.format.codec}") is not None


SERVED = frozenset(dtype for dtype in KVDtype if has_kernels(dtype))
"""Formats that the Triton kernels write and read."""
