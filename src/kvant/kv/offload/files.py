"""Page files in the background: reads, writes and looks happen in threads that the engine does not wait for.

Writes are bounded: while too many bytes are on their way, or writing failed a moment ago, no more are taken.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvant.kv.offload.log_once import LogOnce
from kvant.kv.offload.moves import Bell, Key
from kvant.kv.offload.page_files import HEADER_BYTES, BadPage, PageFiles
from kvant.kv.offload.source import Prompt, Wanted
from kvant.kv.offload.stats import TierCounts

MOST_WRITING = 64 << 20
"""Bytes on their way to files, or one page if that is more."""

PAUSE_SECONDS = 30.0
"""No write is tried for so long after one failed."""

SCAN_SECONDS = 60.0
"""Time between two looks at the whole directory, whose other users write to it too."""

_READERS = 4
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class FileQueue:
    """Page files behind queues: `Files`. All methods belong to one thread; `bell` is rung by the others.

    row: the bytes of a page of host memory, by group and page.
    """

    def __init__(self, files: PageFiles, bell: Bell, row: Callable[[int, int], memoryview]) -> None:
        self._files, self._bell, self._row = files, bell, row
        self._known: set[Key] = set()
        self._own: set[Key] = set()  # that this process wrote
        self._num_bytes = 0
        self._writing_bytes = 0
        self._paused_until = 0.0
        self._num_probes = 0
        self._log_once = LogOnce(_log)
        self._counts = TierCounts()
        self._read: deque[tuple[Key, bytes | None, float]] = deque()
        self._written: deque[tuple[Key, bool, int]] = deque()
        self._probed: deque[int] = deque()
        self._readers = ThreadPoolExecutor(_READERS, "kvant-read")
        self._writer = ThreadPoolExecutor(1, "kvant-write")
        self._scanned = 0.0
        self._writer.submit(self._guarded, self._scan)

    # -- what is there -------------------------------------------------------------------------

    def has(self, key: Key) -> bool:
        """Whether a file was seen; it may be gone or damaged."""
        return key in self._known

    @property
    def tier(self) -> str:
        return "disk"

    @property
    def num_bad(self) -> int:
        return self._counts.bad

    @property
    def is_ready(self) -> bool:
        return True

    @property
    def store(self) -> PageFiles:
        return self._files

    @property
    def others(self) -> Sequence[PageFiles]:
        return ()

    @property
    def num_pages(self) -> int:
        """Pages of this identity that were seen."""
        return len(self._known)

    @property
    def num_bytes(self) -> int:
        """Bytes of all page files in the directory, as far as they were seen."""
        return self._num_bytes

    @property
    def takes_writes(self) -> bool:
        return self._writing_bytes < MOST_WRITING and time.monotonic() >= self._paused_until

    @property
    def is_probing(self) -> bool:
        return self._num_probes > 0

    def counted(self, counts: TierCounts) -> TierCounts:
        """Counts of another place together with evicted files."""
        counts = counts.with_pages(0, 0)
        counts.evicted += self._counts.evicted
        return counts

    # -- requests of the engine's thread -------------------------------------------------------

    def probe(
        self, number: int, pages: Sequence[Wanted], windows: Sequence[int | None], prompt: Prompt
    ) -> None:
        """As `Source.probe`."""
        self._num_probes += 1
        digests = [page.digest for page in pages]
        self._readers.submit(self._guarded, lambda: self._probe(number, digests, windows))

    def read(self, reads: Iterable[tuple[Key, int]]) -> None:
        """As `Source.read`."""
        for key, page in reads:
            self._readers.submit(self._read_one, key, self._row(key.group, page))

    def write(self, writes: Iterable[tuple[Key, int, bytes]]) -> None:
        """As `Files.write`."""
        for key, page, total in writes:
            row = self._row(key.group, page)
            self._writing_bytes += len(row)
            self._writer.submit(self._write_one, key, row, total)

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that pages were used, the first ones of a sequence first."""
        paths = [self._files.path(*key) for key in keys if key in self._known]
        if paths:
            self._writer.submit(self._guarded, lambda: self._files.touch(paths))

    def forget(self, key: Key) -> None:
        """Removes a file whose contents are not trusted."""
        if key in self._known:
            self._known.discard(key)
            self._writer.submit(self._guarded, lambda: self._files.remove(*key))

    def forget_own(self) -> None:
        """Removes every file that this process wrote."""
        own, self._own = self._own, set()
        for key in own:
            self._known.discard(key)
            self._writer.submit(self._files.remove, *key)

    # -- results -------------------------------------------------------------------------------

    def take_read(self) -> list[tuple[Key, bytes | None, float]]:
        """Pages that were read, their checksums, and the seconds it took; None for one that was missing."""
        return _emptied(self._read)

    def take_written(self) -> list[tuple[Key, bool]]:
        """Pages that are no longer needed in host memory, and whether files have them now."""
        found = _emptied(self._written)
        self._writing_bytes -= sum(size for _, _, size in found)
        return [(key, is_written) for key, is_written, _ in found]

    def take_probed(self) -> list[int]:
        found = _emptied(self._probed)
        self._num_probes -= len(found)
        return found

    # -- in threads ----------------------------------------------------------------------------

    def _probe(self, number: int, digests: Sequence[bytes], windows: Sequence[int | None]) -> None:
        try:
            for digest in digests:
                is_lost = False
                for group, window in enumerate(windows):
                    if os.path.exists(self._files.path(group, digest)):
                        self._known.add(Key(group, digest))
                    else:
                        is_lost |= window is None
                if is_lost:
                    break
        finally:
            self._probed.append(number)
            self._bell.ring()

    def _read_one(self, key: Key, row: memoryview) -> None:
        total = None
        started = time.perf_counter()
        try:
            total = self._files.read(*key, row)
            self._known.add(key)
        except BadPage as fault:
            self._counts.bad += 1
            self._log_once("bad", "a page file was not used: %s; it is computed again", fault)
            self._files.remove(*key)
            self._known.discard(key)
        except OSError as fault:
            self._known.discard(key)
            if not isinstance(fault, FileNotFoundError):
                self._log_once("read", "a page file could not be read: %s", fault)
        except BaseException:
            _log.exception("a page file could not be read")
        self._read.append((key, total, time.perf_counter() - started))
        self._bell.ring()

    def _write_one(self, key: Key, row: memoryview, total: bytes) -> None:
        is_written = False
        try:
            if time.monotonic() >= self._paused_until:
                self._num_bytes += self._files.write(*key, row, total)
                self._known.add(key)
                self._own.add(key)
                is_written = True
        except OSError as fault:
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            self._log_once("write", "pages are not written to files for now: %s", fault)
        except BaseException:
            _log.exception("a page file could not be written")
        self._written.append((key, is_written, len(row)))
        self._bell.ring()
        if self._num_bytes > self._files.budget or time.monotonic() - self._scanned > SCAN_SECONDS:
            self._guarded(self._scan)

    def _scan(self) -> None:
        """Looks at every file, and removes some if they are too many."""
        self._scanned = time.monotonic()
        for file in self._files.scan():
            found = self._files.key_of(file.path)
            if found is not None and file.num_bytes > HEADER_BYTES:
                self._known.add(Key(*found))
        trimmed = self._files.trim()
        if trimmed is not None:
            self._num_bytes, removed = trimmed
            self._counts.evicted += len(removed)
            for path in removed:
                found = self._files.key_of(path)
                if found is not None:
                    self._known.discard(Key(*found))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as fault:
            self._log_once("scan", "page files could not be looked at: %s", fault)
        except BaseException:
            _log.exception("work on page files failed")


def _emptied(queue: deque[_T]) -> list[_T]:
    found = []
    while queue:
        found.append(queue.popleft())
    return found
