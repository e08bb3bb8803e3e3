"""The environment of a program that compiles kernels for a GPU that is not here."""

from __future__ import annotations

import os
from pathlib import Path


def compile_environment(cache: Path) -> dict[str, str]:
    """Variables for a Triton without its interpreter and with an empty cache.

    `make kernels` names the oldest supported Triton in KVANT_TEST_OLDEST_TRITON; it compiles then.
    """
    found = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    found.pop("TRITON_INTERPRET", None)
    oldest = found.pop("KVANT_TEST_OLDEST_TRITON", None)
    if oldest is not None:
        found["PYTHONPATH"] = os.pathsep.join([oldest, found.get("PYTHONPATH", "")])
    return found
