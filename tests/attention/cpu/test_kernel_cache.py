"""Compiled kernels that nobody uses any more do not stay for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvant.attention.cpu.compiled import KEPT_DAYS, kernel_cache


def made(root: Path, name: str, *, days: float) -> Path:
    place = root / name
    place.mkdir(parents=True)
    (place / "kernel.nbc").write_bytes(b"code")
    then = time.time() - days * 24 * 3600
    os.utime(place, (then, then))
    return place


def test_kernels_of_sources_that_are_gone_are_removed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path))
    root = tmp_path / "kernels"
    old = made(root, "0123456789abcdef", days=KEPT_DAYS + 1)
    another = made(root, "fedcba9876543210", days=KEPT_DAYS - 1)
    somebodys = made(root, "notes", days=KEPT_DAYS + 1)
    place = kernel_cache.__wrapped__()
    assert place is not None
    assert not old.exists()
    assert another.exists()
    assert somebodys.exists()
    made(root, f"{0:016x}", days=0)
    then = time.time() - (KEPT_DAYS + 1) * 24 * 3600
    os.utime(place, (then, then))
    assert kernel_cache.__wrapped__() == place, "in use again"
    assert place.stat().st_mtime > then + 1


def test_a_directory_that_was_named_for_numba_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    old = made(tmp_path, "0123456789abcdef", days=KEPT_DAYS + 1)
    assert kernel_cache.__wrapped__() is not None
    assert old.exists()
