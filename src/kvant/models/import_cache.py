"""The cache directory of imported models; an import appears there complete or not at all.

An import is built in a hidden directory beside its final place and renamed when it is complete, so
that a crash at any moment leaves nothing under the final name. A lock keeps two processes from
doing the same work. The next holder of the lock removes what a dead process left.

    $KVANT_CACHE or ~/.cache/kvant     created with mode 0700
      gguf/<name>/                     one complete import; kvant-import.json lists its files
      gguf/.<name>.partial/            one in the making
      gguf/.<name>.lock
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvant.errors import ConfigError, WayOut

RECORD = "kvant-import.json"
_OTHER_PLACE = WayOut("keep imported models elsewhere: set KVANT_CACHE to a directory")


def cache_root() -> Path:
    """Returns the cache directory of this user, which need not exist yet."""
    return Path(os.environ.get("KVANT_CACHE") or "~/.cache/kvant").expanduser()


def imports_directory(kind: str) -> Path:
    """Returns the directory for one kind of import, which need not exist yet. To use a finished import, no
    right to write there is needed."""
    return cache_root() / kind


def is_complete(directory: Path) -> bool:
    """Returns whether every file of the import exists with its written size."""
    try:
        record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
        sizes: dict[str, int] = record["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def making(final: Path, needed_bytes: int) -> Iterator[Path | None]:
    """Yields an empty directory to fill, which becomes `final` at the end of the block.

    Yields None if another process completed `final` meanwhile. needed_bytes: bytes that will be
    written. Raises ConfigError at the start if the disk has less free space. The block must call
    `seal` last. An exception leaves neither `final` nor the partial directory behind.
    """
    from filelock import FileLock

    partial = final.parent / f".{final.name}.partial"
    _make_writable(final.parent)
    with FileLock(final.parent / f".{final.name}.lock"):
        if is_complete(final):
            yield None
            return
        _remove(partial)  # from a process that died, since this one has the lock
        _remove(final)  # it is damaged, since it is not complete
        _check_space(final.parent, needed_bytes)
        partial.mkdir(mode=0o700)
        try:
            yield partial
            assert is_complete(partial), "the import was not sealed"
            partial.rename(final)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(final.parent, needed_bytes) from error
            raise
        finally:
            _remove(partial)


def seal(directory: Path, facts: dict[str, object]) -> None:
    """Writes the record that makes an import complete: `facts` and the size of every file."""
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    record = {**facts, "files": sizes}
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _make_writable(directory: Path) -> None:
    """Creates the directory and its missing parents, with access for this user only."""
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no permission to write", str(directory))
    except OSError as error:
        raise ConfigError(
            f"cannot use the cache directory {directory}", why=str(error), ways_out=[_OTHER_PLACE]
        ) from error


def _check_space(directory: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(directory).free < needed_bytes:
        raise _no_space(directory, needed_bytes)


def _no_space(directory: Path, needed_bytes: int) -> ConfigError:
    return ConfigError(
        f"not enough disk space in {directory}",
        why=f"the import takes {needed_bytes / 2**20:.0f} MiB, "
        f"{shutil.disk_usage(directory).free / 2**20:.0f} MiB are free",
        ways_out=[WayOut("free some space"), _OTHER_PLACE],
    )


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
