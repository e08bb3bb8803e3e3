"""Pages as files: one file for each page, named by its hash, below a directory of its identity.

    DIRECTORY/<identity>/identity.json      the fields, for people and for messages
    DIRECTORY/<identity>/<ab>/<hash>.<group>

A file appears whole, by a rename, and never changes; so several processes may share a directory. The
directory is its own index. A file that is cut short, damaged or of another identity fails its checks and
counts as missing. Files are not synchronised: after a loss of power the checks find what was lost.

Everything here blocks; `kvant.kv.offload.files` runs it in threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvant.errors import NotServable, WayOut
from kvant.kv.identity import PageIdentity

_HEADER = struct.Struct("<8s32s32sIQ16s")
_MAGIC = b"KVANTPG1"
HEADER_BYTES = 128
_OLD_SECONDS = 900
"""A temporary file that was not changed for so long has no writer any more."""

_TRIM_TO = 0.95
"""Share of the budget that is left after files were removed, so that each removal is worth its search."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file that was found. used: nanoseconds of its last use."""

    path: str
    num_bytes: int
    used: int


class BadPage(Exception):
    """A page file that is not what its name says."""


def checksum(data: memoryview) -> bytes:
    """16 bytes over a page's bytes. The interpreter runs other threads meanwhile."""
    return xxhash.xxh3_128_digest(data)


class PageFiles:
    """Page files of one identity in `directory`, which may hold others. budget: bytes of all files.

    pinned: returns the names of files in a directory that must not be removed.

    Raises NotServable if the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        identity: PageIdentity,
        budget: int,
        *,
        pinned: Callable[[Path], set[str]] = lambda directory: set(),
    ) -> None:
        self._pinned = pinned
        self.directory, self.identity, self.budget = directory, identity, budget
        self._digest = identity.digest
        self.home = directory / self._digest.hex()[:32]
        # Not the process's id: several containers that share the directory may each have a process 1.
        self._writer, self._numbers = uuid.uuid4().hex, itertools.count()
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self.write_whole(self.home / "identity.json", json.dumps(identity.fields).encode())
            with self.locked():
                pass
        except OSError as fault:
            raise NotServable(
                f"pages cannot be kept in {directory}",
                why=str(fault.strerror or fault),
                ways_out=(
                    WayOut("name a directory that can be written: --kv-offload host:..,disk:.."),
                ),
            ) from None

    def path(self, group: int, digest: bytes) -> Path:
        name = digest.hex()
        return self.home / name[:2] / f"{name}.{group}"

    def write(self, group: int, digest: bytes, data: memoryview, total: bytes) -> int:
        """Writes a page whose checksum is `total`; returns the bytes of its file. Raises OSError."""
        path = self.path(group, digest)
        path.parent.mkdir(exist_ok=True)
        self.write_whole(path, self._header(group, digest, len(data), total), data)
        return HEADER_BYTES + len(data)

    def read(self, group: int, digest: bytes, into: memoryview) -> bytes:
        """Reads a page into memory of its size; returns its checksum. Raises OSError, and BadPage."""
        with open(self.path(group, digest), "rb", buffering=0) as file:
            header = file.read(HEADER_BYTES)
            if len(header) != HEADER_BYTES:
                raise BadPage("the file is cut short")
            total = header[_HEADER.size - 16 : _HEADER.size]
            if header != self._header(group, digest, len(into), total):
                raise BadPage("the file is of another page, model or format")
            done = 0
            while done < len(into):
                count = file.readinto(into[done:])
                if not count:
                    raise BadPage("the file is cut short")
                done += count
            if file.read(1):
                raise BadPage("the file is too long")
        if checksum(into) != total:
            raise BadPage("the checksum is wrong")
        return total

    def touch(self, paths: Iterable[Path]) -> None:
        """Notes that pages of one sequence were used; the first ones stay longest."""
        now = time.time_ns()
        for place, path in enumerate(paths):
            with contextlib.suppress(OSError):
                os.utime(path, ns=(now - place, now - place))

    def remove(self, group: int, digest: bytes) -> None:
        with contextlib.suppress(OSError):
            self.path(group, digest).unlink()

    def scan(self) -> Iterator[PageFile]:
        """Yields every page file of every identity. Removes what interrupted writers left."""
        before = time.time() - _OLD_SECONDS
        for home in _entries(self.directory):
            if not home.is_dir(follow_symlinks=False):
                continue
            for part in _entries(home.path):
                if not part.is_dir(follow_symlinks=False) or len(part.name) != 2:
                    _remove_if_old(part, before)
                    continue
                for file in _entries(part.path):
                    with contextlib.suppress(OSError):
                        stat = file.stat(follow_symlinks=False)
                        if file.name.startswith(_TEMPORARY):
                            _remove_if_old(file, before)
                        else:
                            yield PageFile(file.path, stat.st_size, stat.st_mtime_ns)

    def trim(self) -> tuple[int, list[str]] | None:
        """Removes the least recently used files, if all are above the budget.

        Returns bytes that are left and the paths of removed files; None while another process removes some.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.locked(patiently=False))
            except BlockingIOError:
                return None
            kept = self._pinned(self.directory)
            found = sorted(self.scan(), key=lambda file: file.used)
            left = sum(file.num_bytes for file in found)
            removed: list[str] = []
            if left <= self.budget:
                return left, removed
            for file in found:
                if left <= self.budget * _TRIM_TO:
                    break
                if Path(file.path).name in kept:
                    continue
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
                    removed.append(file.path)
                    left -= file.num_bytes
            return left, removed

    @contextlib.contextmanager
    def locked(self, *, patiently: bool = True) -> Iterator[None]:
        """Holds the lock under which one process at a time removes files or saves a session.

        Raises BlockingIOError if another one has the lock and this one is not patient.
        """
        with open(self.directory / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if patiently else fcntl.LOCK_NB))
            yield

    def key_of(self, path: str) -> tuple[int, bytes] | None:
        """Returns the group and hash of a page file of this identity; None for another file."""
        found = Path(path)
        name, _, group = found.name.partition(".")
        if found.parent.parent != self.home or not group.isdecimal():
            return None
        try:
            return int(group), bytes.fromhex(name)
        except ValueError:
            return None

    def _header(self, group: int, digest: bytes, length: int, total: bytes) -> bytes:
        head = _HEADER.pack(_MAGIC, self._digest, digest, group, length, total)
        return head.ljust(HEADER_BYTES, b"\0")

    def write_whole(self, path: Path, *parts: bytes | memoryview, durable: bool = False) -> None:
        """Writes a file that others see whole or not at all. durable: also after a loss of power."""
        beside = path.with_name(f"{_TEMPORARY}{self._writer}-{next(self._numbers)}")
        try:
            with open(beside, "xb", buffering=0) as file:
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view) :]
                if durable:
                    os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise


_TEMPORARY = ".new-"


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []


def _remove_if_old(entry: os.DirEntry[str], before: float) -> None:
    with contextlib.suppress(OSError):
        is_old = entry.stat(follow_symlinks=False).st_mtime < before
        if entry.name.startswith(_TEMPORARY) and is_old:
            os.unlink(entry.path)
