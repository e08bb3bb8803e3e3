"""Whether this machine runs the compiled forward, without torch or numba."""

from __future__ import annotations

import importlib.util

from kvant.models.geometry.compute_dtype import host_cpu_has_avx2


def refuse_host() -> str | None:
    """Why not; None if it does."""
    if not host_cpu_has_avx2():
        return "its kernels need a CPU with AVX2"
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    return None
