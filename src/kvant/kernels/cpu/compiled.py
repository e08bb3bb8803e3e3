"""The disk cache of compiled kernels: in the user's cache, under a name that changes with the sources.

numba would store them beside the sources, where an installed package may not write, and would check only one
source file, but these kernels use several. If nothing can be written, every start compiles them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numba.core.config
from numba import cfunc, types

import kvant

config: Any = numba.core.config
KEPT_DAYS = 30
_log = logging.getLogger(__name__)
_DIGEST = re.compile("[0-9a-f]{16}")


@cache
def kernel_cache() -> Path | None:
    """Returns a directory under $NUMBA_CACHE_DIR, else under $KVANT_CACHE (~/.cache/kvant).

    None if unwritable.
    """
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    package = Path(kvant.__file__).parent
    # Declarations and constants of formats are part of the kernels.
    kernels = (path for path in package.rglob("*.py") if "cpu" in path.relative_to(package).parts)
    formats = (package / "kv" / name for name in ("format.py", "dtype.py"))
    for source in sorted([*kernels, *formats, *package.glob("kv/codecs/*.py")]):
        digest.update(source.read_bytes())
    own = Path(os.environ.get("KVANT_CACHE") or "~/.cache/kvant").expanduser() / "kernels"
    root = Path(os.environ.get("NUMBA_CACHE_DIR") or own)
    place = root / digest.hexdigest()[:16]
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.utime(place)
        if root == own:
            _remove_unused(own)
    except OSError:
        return None
    return place if os.access(place, os.W_OK) else None


def _remove_unused(root: Path) -> None:
    """Removes kernels of sources that were not used for KEPT_DAYS; another version may still be in use."""
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for place in root.iterdir():
        if _DIGEST.fullmatch(place.name) and place.stat().st_mtime < oldest:
            shutil.rmtree(place, ignore_errors=True)


@contextmanager
def kept_on_disk() -> Iterator[bool]:
    """Yields numba's `cache` argument; functions decorated in this context are kept in `kernel_cache`.

    numba reads its setting when it decorates a function, so other users of numba in this process are
    not affected.
    """
    place = kernel_cache()
    before = config.CACHE_DIR
    config.CACHE_DIR = "" if place is None else str(place)
    try:
        yield place is not None
    finally:
        config.CACHE_DIR = before


WORKER = types.void(types.int64, types.int64)
"""Signature of a worker: the address of a block of fields, and a number that may be unused."""


def compiled(function: Callable[..., Any], signature: Any = WORKER) -> Any:
    """Returns numba's cfunc of `function`, loaded from `kernel_cache` or added to it.

    numba fails if a cached file is truncated, as after a crash, or if the disk is full. Truncated files
    are removed; on a full disk nothing is kept.
    """
    with kept_on_disk() as is_kept:
        try:
            return _cfunc(function, signature, is_kept)
        except OSError as fault:
            _tell_once(config.CACHE_DIR, str(fault))
        except Exception:  # any type, since numba's files are pickles
            if not is_kept:
                raise
            shutil.rmtree(config.CACHE_DIR, ignore_errors=True)
            return _cfunc(function, signature, is_kept)
    return _cfunc(function, signature, False)


def _cfunc(function: Callable[..., Any], signature: Any, is_kept: bool) -> Any:
    return cfunc(signature, cache=is_kept, error_model="numpy")(function)


@cache
def _tell_once(place: str, why: str) -> None:
    _log.warning("kernels are not kept in %s (%s): every start compiles them", place, why)


@cache
def compiled_worker(work: Callable[..., None], signature: Any = WORKER) -> int:
    """Compiles `work`, which every thread runs, and returns its address."""
    return int(compiled(work, signature).address)


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled function of four int64: callable from Python, without the interpreter's lock, and by
    its address from other compiled code.
    """

    call: Callable[[int, int, int, int], int]
    address: int


@cache
def compiled_entry(function: Callable[[int, int, int, int], int]) -> Entry:
    """Compiles `function`, which takes four int64 (addresses or numbers)."""
    made = compiled(function, "int64(int64, int64, int64, int64)")
    return Entry(made.ctypes, int(made.address))
