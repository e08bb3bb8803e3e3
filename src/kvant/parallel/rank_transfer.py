"""Another rank's parts of pages that engines exchange. Rank 0 decides (`kvant.parallel.transfer`)."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvant.kv.identity import PageIdentity
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Key, part_of
from kvant.kv.transfer.memory import ReadFailed, RemoteMemory
from kvant.kv.transfer.messages import Part
from kvant.kv.transfer.reader import READ_PAGES, Converter, PartReader, Read
from kvant.parallel.messages import FromRank, PeerRead, ReadPeer

RETRY_SECONDS = 5.0
"""Time between two attempts to reach a rank that was not reached, or not read from."""

_log = logging.getLogger(__name__)


class GivenMemory:
    """Host memory that other engines' ranks may read. agent: what they need, NIXL's metadata.

    Raises NotServable without NIXL.
    """

    def __init__(self, rows: HostRows) -> None:
        self._rows = rows
        self._memory = RemoteMemory(uuid.uuid4().hex)
        self._memory.register(rows.address, rows.bytes.numel())
        self.agent = self._memory.metadata


class PeerParts:
    """Reads this rank's parts of the pages of one other engine, in a thread of its own.

    number: of the engine. identity, rows, converter: as in `PartReader`. say: sends a message to rank 0.
    """

    def __init__(
        self, number: int, rank: int, identity: PageIdentity, rows: HostRows,
        converter: Converter | None, say: Callable[[FromRank], None],
    ) -> None:  # fmt: skip
        self._number, self._rank, self._rows, self._say = number, rank, rows, say
        self._reader = PartReader(uuid.uuid4().hex, identity, rows, converter)
        self._part: Part | None = None
        self._is_met = False
        self._tried = 0.0
        self._thread = ThreadPoolExecutor(1, "kvant-take")

    def meet(self, parts: Sequence[Part]) -> None:
        """Reads from the rank of the same number from now on. parts: of ranks 1 and up."""
        self._thread.submit(self._meet, parts[self._rank - 1])

    def read(self, asked: ReadPeer) -> None:
        self._thread.submit(self._read, asked)

    # -- in the thread -------------------------------------------------------------------------

    def _meet(self, part: Part) -> None:
        self._tried = time.monotonic()
        self._part, self._is_met = part, False
        try:
            self._reader.meet(part)
            self._is_met = True
        except Exception as fault:
            _log.warning("NIXL does not reach rank %d of another engine: %s", self._rank, fault)

    def _read(self, asked: ReadPeer) -> None:
        for start in range(0, len(asked.reads), READ_PAGES):
            reads = [
                Read(Key(group, digest), self._rows.row(group, page), there, self._own(total))
                for group, digest, page, there, total in asked.reads[start : start + READ_PAGES]
            ]
            done = self._done(reads)
            found = tuple((*key, total, seconds) for key, total, seconds in done)
            try:
                self._say(PeerRead(self._number, found, self._reader.num_bad))
            except OSError:
                return  # rank 0 is gone

    def _done(self, reads: Sequence[Read]) -> list[tuple[Key, bytes | None, float]]:
        """Reads parts; none of them is there if the other rank cannot be read from."""
        is_due = time.monotonic() - self._tried > RETRY_SECONDS
        if not self._is_met and self._part is not None and is_due:
            self._meet(self._part)
        try:
            if self._is_met:
                return self._reader.read(reads)
        except ReadFailed as fault:
            _log.warning("rank %d of another engine is not read: %s", self._rank, fault)
            self._reader.part()
            self._is_met, self._tried = False, time.monotonic()
        except Exception:
            _log.exception("pages of rank %d of another engine could not be taken", self._rank)
        return [(read.key, None, 0.0) for read in reads]

    def _own(self, checksums: bytes) -> bytes:
        return part_of(checksums, self._rank)
