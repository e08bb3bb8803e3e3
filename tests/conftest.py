"""The table of acceptance cases at the end of a run, and the audit of engines at the end of a test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Tests and their processes keep compiled CPU kernels in one place, also with a KVANT_CACHE of their own:
# compiling them takes half a minute.
_CACHE = Path(os.environ.get("KVANT_CACHE") or "~/.cache/kvant").expanduser()
os.environ.setdefault("NUMBA_CACHE_DIR", str(_CACHE / "kernels"))

# Kernels run under Triton's interpreter in `make kernels` alone. Elsewhere a machine without a GPU is tested
# as one without Triton, which torch from PyPI brings along.
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    sys.modules["triton"] = None  # type: ignore[assignment]

pytest_plugins = ["tests.acceptance.report", "tests.audit", "tests.workers"]
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    pytest_plugins.append("tests.interpreter")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What tests import stays until the end; each search for garbage among it takes 0.3 s of a core."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu ..` imports no file without such a test: a machine lent for its GPU may lack much of what a
    server and its tests need. Every other run imports them all, and fails where something is missing.
    """
    if config.option.markexpr.split()[:1] != ["gpu"]:
        return None
    is_directory = collection_path.is_dir()
    files = collection_path.rglob("test_*.py") if is_directory else [collection_path]
    return None if any("mark.gpu" in file.read_text(encoding="utf-8") for file in files) else True
