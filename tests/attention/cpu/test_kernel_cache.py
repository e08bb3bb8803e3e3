"""Compiled kernels are kept while they are used, in a directory that can be written."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from numba.core.caching import IndexDataCacheFile

from kvant.kernels.cpu import compiled as module
from kvant.kernels.cpu.compiled import KEPT_DAYS, compiled, kernel_cache


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


def doubled(x: int) -> int:
    return 2 * x


def run_kept() -> int:
    """Compiled as in a process that has just started."""
    return int(compiled(doubled, "int64(int64)").ctypes(21))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "kernel_cache", lambda: tmp_path)
    module._tell_once.cache_clear()
    return tmp_path


@pytest.mark.parametrize("left", [0, 40])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_kernels_that_were_cut_short_are_compiled_and_kept_anew(
    place: Path, kind: str, left: int
) -> None:
    assert run_kept() == 42
    (file,) = place.rglob(f"*.{kind}")
    whole = file.stat().st_size
    os.truncate(file, left)
    assert run_kept() == 42
    (again,) = place.rglob(f"*.{kind}")
    assert again.stat().st_size == whole


def test_a_full_disk_keeps_no_kernels_and_says_so_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)
    assert (run_kept(), run_kept()) == (42, 42)
    (line,) = caplog.messages
    assert str(place) in line
    assert "No space left" in line
