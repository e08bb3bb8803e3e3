"""Reads one rank's parts of another engine's pages into host memory; checks and converts them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvant.kv.identity import PageIdentity
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Key
from kvant.kv.offload.page_files import checksum
from kvant.kv.transfer.memory import ReadFailed, RemoteMemory
from kvant.kv.transfer.messages import GroupRows, Part

READ_PAGES = 128
"""Pages of one read over NIXL."""

_log = logging.getLogger(__name__)


class Converter(Protocol):
    """Converts one rank's parts of pages; see `kvant.kv.transfer.convert`."""

    def convert(
        self, theirs: Sequence[GroupRows], key: Key, row: memoryview, into: memoryview
    ) -> None:
        """Decodes a page with the codecs of its formats, and encodes it with this engine's."""
        ...


class Read(NamedTuple):
    """A page to read. row: where to, of this rank. page: its index there. checksum: of the part there."""

    key: Key
    row: memoryview
    page: int
    checksum: bytes


class PartReader:
    """Reads parts of pages. Belongs to one thread.

    name: of the NIXL agent, of which no two exist. identity: of this rank's parts. rows: host memory where
    pages are read to, kept until it is no longer registered. num_bad: parts with a wrong checksum so far.
    Raises NotServable without NIXL.
    """

    def __init__(
        self, name: str, identity: PageIdentity, rows: HostRows, converter: Converter | None = None
    ) -> None:
        self._rows, self._identity, self._converter = rows, identity, converter
        self._memory = RemoteMemory(name)
        self._memory.register(rows.address, rows.bytes.numel())
        self._part: Part | None = None
        self._peer = ""
        self._scratch: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
        self._has_told = False
        self.num_bad = 0

    def meet(self, part: Part) -> None:
        """Reads from the other engine's rank `part` from now on. Raises what NIXL raises."""
        self.part()
        self._peer = self._memory.meet(part.agent)
        self._part, self._has_told = part, False

    def part(self) -> None:
        """Forgets the other rank."""
        if self._part is not None:
            self._memory.part(self._peer)
        self._part = None

    def close(self) -> None:
        self.part()
        self._memory.close()

    def read(self, reads: Sequence[Read]) -> list[tuple[Key, bytes | None, float]]:
        """Reads at most READ_PAGES parts. Returns each one's checksum here, None if it is bad, and seconds.

        Raises ReadFailed.
        """
        part = self._part
        if part is None:
            raise ReadFailed("it is not met")
        started = time.perf_counter()
        is_same = part.identity == self._identity.fields
        rows = [read.row for read in reads] if is_same else self._room(part, reads)
        pieces = [
            (_address(row), part.first + part.groups[read.key.group].stride * read.page, len(row))
            for row, read in zip(rows, reads, strict=True)
        ]
        self._memory.read(self._peer, pieces)
        sums = [
            self._checked(part, read, row, is_same) for read, row in zip(reads, rows, strict=True)
        ]
        each = (time.perf_counter() - started) / max(1, len(reads))
        return [(read.key, total, each) for read, total in zip(reads, sums, strict=True)]

    def _checked(self, part: Part, read: Read, row: memoryview, is_same: bool) -> bytes | None:
        """Converts a part if it is of another identity. Returns its checksum here, None if it is bad."""
        if checksum(row) != read.checksum:
            self.num_bad += 1
            if not self._has_told:
                self._has_told = True
                _log.warning(
                    "a page of another engine was not what it said, for example because it gave way"
                )
            return None
        if is_same:
            return read.checksum
        assert self._converter is not None, "unlike pages are refused without one"
        self._converter.convert(part.groups, read.key, row, read.row)
        return checksum(read.row)

    def _room(self, part: Part, reads: Sequence[Read]) -> list[memoryview]:
        """Returns memory for the other rank's parts before they are converted."""
        if self._scratch is None:
            most = READ_PAGES * max(group.num_bytes for group in part.groups)
            self._scratch = np.zeros(most, np.uint8)
            self._memory.register(self._scratch.ctypes.data, most)
        room, at, rows = memoryview(self._scratch.data), 0, list[memoryview]()
        for read in reads:
            size = part.groups[read.key.group].num_bytes
            rows.append(room[at : at + size])
            at += size
        return rows


def _address(row: memoryview) -> int:
    return int(np.frombuffer(row, np.uint8).ctypes.data)
