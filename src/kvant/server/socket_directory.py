"""The directory of the engine's socket: mode 0700, removed at the end, also by the next server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "kvant-serve-"
_LOCK = "lock"


class SocketDirectory:
    """A new directory below the system's temporary one, locked while this process lives.

    First removes what killed servers left: directories of this user whose lock is free.
    """

    def __init__(self) -> None:
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Python opens files so that the engine's process does not inherit them, nor the lock.
        self._lock = (self.path / "new-lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "new-lock").rename(self.path / _LOCK)  # never seen unlocked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        # Another user's, or gone meanwhile, or in use: not ours to remove.
        with contextlib.suppress(OSError):
            if path.parent.is_symlink() or path.parent.stat().st_uid != os.getuid():
                continue
            with path.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
