"""The directory of the engine's socket, with mode 0700. A killed server's is removed by the next server."""

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
    """A new directory in the system's temporary directory, locked while this process lives.

    The constructor first removes directories of killed servers: those of this user whose lock is free.
    """

    def __init__(self) -> None:
        _sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Python's files are not inherited, so the engine's process does not hold the lock.
        self._lock = (self.path / "new-lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "new-lock").rename(
            self.path / _LOCK
        )  # renamed last: others never see it unlocked

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        # An error means that the directory is another user's, is gone meanwhile, or is in use.
        with contextlib.suppress(OSError):
            if path.parent.is_symlink() or path.parent.stat().st_uid != os.getuid():
                continue
            with path.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
