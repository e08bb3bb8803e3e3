"""Tiers of a divided model: rank 0 decides where pages are kept, and every rank keeps its part of each page.

A page has the same index in the host memory of all ranks, and the same name in their files. Its checksum is
the concatenation of all parts' checksums, in the order of ranks. A page counts as stored or restored once
every rank has its part. If one part is missing, the page counts as missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from kvant.kv.identity import PageIdentity
from kvant.kv.offload.moves import Bell, Key, Move, Moved, Mover, part_of
from kvant.kv.offload.source import Files, Prompt, Source, Wanted
from kvant.kv.offload.stats import TierCounts
from kvant.kv.transfer.messages import Part
from kvant.parallel.messages import (
    FilesDone,
    ForgetFiles,
    KeepPages,
    KeepsPages,
    LoadPages,
    PeerRead,
    ReadFiles,
    StorePages,
    TouchFiles,
    WriteFiles,
)
from kvant.parallel.ranks import Ranks

if TYPE_CHECKING:
    from kvant.kv.offload.files import FileQueue
    from kvant.kv.offload.mover import PageMover
    from kvant.kv.offload.page_files import PageFiles

_T = TypeVar("_T")
_Own = TypeVar("_Own", bound=Source)


class SpreadPages:
    """Extends rank 0's mover and files to all ranks, and starts the others' tiers: a `Spread`.

    files: rank 0's page files. identity: of its pages, None if they go neither to files nor to other
    engines. parts: of ranks 1 and up, for other engines; empty before the call. Raises RankLost, also if a
    rank cannot use its host memory or its directory.
    """

    def __init__(
        self, ranks: Ranks, files: PageFiles | None, identity: PageIdentity | None
    ) -> None:
        self._ranks, self._files = ranks, files
        self.parts: list[Part] = []
        ranks.send(KeepPages(None if identity is None else identity.fields))

    def __call__(
        self, own: PageMover, queue: FileQueue | None, bell: Bell
    ) -> tuple[Mover, Files | None]:
        files, ranks, stores = self._files, self._ranks, []
        for answer in ranks.answers():
            assert isinstance(answer, KeepsPages)
            if files is not None:
                assert answer.identity is not None
                identity = PageIdentity(**answer.identity)
                stores.append(type(files)(files.directory, identity, files.budget))
            if answer.part is not None:
                self.parts.append(answer.part)
        ranks.inbox.ring = bell.ring
        found = None if queue is None else RankedFiles(queue, stores, ranks, own.page_bytes)
        return RankedMover(own, ranks), found


class RankedMover:
    """A `Mover` that moves the parts of all ranks. own: rank 0's mover. Its methods raise RankLost."""

    def __init__(self, own: Mover, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._size = 1 + len(ranks.pids)
        self._jobs: dict[int, dict[int, Moved]] = {}

    @property
    def page_bytes(self) -> Sequence[int]:
        """Bytes of a page of each group, summed over all ranks' parts."""
        return [self._size * size for size in self._own.page_bytes]

    def row(self, group: int, host_page: int) -> memoryview:
        """Returns the bytes of rank 0's part of a host page."""
        return self._own.row(group, host_page)

    def store(self, job: int, moves: Sequence[Move]) -> None:
        self._jobs[job] = {}
        places = [(move.group, move.device_page, move.host_page) for move in moves]
        self._ranks.send(StorePages(job, places))
        self._own.store(job, moves)

    def load(self, job: int, moves: Sequence[Move]) -> None:
        self._jobs[job] = {}
        places = [(move.group, move.device_page, move.host_page, move.checksum) for move in moves]
        self._ranks.send(LoadPages(job, places))
        self._own.load(job, [m._replace(checksum=part_of(m.checksum, 0)) for m in moves])

    def take(self) -> list[Moved]:
        self._ranks.check()
        for done in self._own.take():
            self._jobs[done.job][0] = done
        for rank, message in emptied(self._ranks.inbox.moved):
            parts = self._jobs[message.job]
            parts[rank] = Moved(
                message.job, message.checksums, message.num_bytes, message.seconds, message.fault
            )
        whole = [job for job, parts in self._jobs.items() if len(parts) == self._size]
        return [_whole(self._jobs.pop(job)) for job in whole]


def _whole(parts: Mapping[int, Moved]) -> Moved:
    """Joins the results of all ranks for one job. parts: by rank."""
    ordered = [parts[rank] for rank in range(len(parts))]
    sums = zip(*(part.checksums for part in ordered), strict=True)
    return Moved(
        ordered[0].job,
        tuple(joined(of_page) for of_page in sums),
        sum(part.num_bytes for part in ordered),
        max(part.seconds for part in ordered),
        next((f"rank {n}: {part.fault}" for n, part in enumerate(ordered) if part.fault), ""),
    )


def joined(sums: Iterable[bytes | None]) -> bytes | None:
    """Joins the checksums of a page's parts; None if a part is missing."""
    found = list(sums)
    there = [one for one in found if one is not None]
    return b"".join(there) if len(there) == len(found) else None


class RankedSource(Generic[_Own]):
    """A `Source` of all ranks. own: rank 0's, which finds pages for all; every rank reads its part of a page.

    A subclass sends `read`, and passes the other ranks' answers on to `_note_reads`.
    """

    def __init__(self, own: _Own, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._size = 1 + len(ranks.pids)
        self._reads: dict[Key, dict[int, tuple[bytes | None, float]]] = {}
        self._bad: dict[int, int] = {}

    @property
    def tier(self) -> str:
        return self._own.tier

    @property
    def num_bad(self) -> int:
        return self._own.num_bad + sum(self._bad.values())

    @property
    def is_ready(self) -> bool:
        return self._own.is_ready

    @property
    def is_probing(self) -> bool:
        return self._own.is_probing

    def has(self, key: Key) -> bool:
        return self._own.has(key)

    def probe(
        self, number: int, pages: Sequence[Wanted], windows: Sequence[int | None], prompt: Prompt
    ) -> None:
        self._own.probe(number, pages, windows, prompt)

    def take_probed(self) -> list[int]:
        return self._own.take_probed()

    def take_read(self) -> list[tuple[Key, bytes | None, float]]:
        self._take_messages()
        for key, total, seconds in self._own.take_read():
            self._reads[key][0] = total, seconds
        return [
            (
                key,
                joined(parts[rank][0] for rank in range(self._size)),
                max(seconds for _, seconds in parts.values()),
            )
            for key, parts in taken(self._reads, self._size)
        ]

    def _take_messages(self) -> None:
        """Notes what other ranks have answered so far."""
        raise NotImplementedError

    def _note_reads(self, rank: int, message: FilesDone | PeerRead) -> None:
        self._bad[rank] = message.num_bad
        for group, digest, total, seconds in message.reads:
            self._reads[Key(group, digest)][rank] = total, seconds


class RankedFiles(RankedSource["FileQueue"]):
    """The `Files` of all ranks. own: rank 0's files, which answer for all. others: the other ranks' files.

    page_bytes: bytes of rank 0's part of a page of each group. Methods that send raise RankLost.
    """

    def __init__(
        self, own: FileQueue, others: Sequence[PageFiles], ranks: Ranks, page_bytes: Sequence[int]
    ) -> None:
        super().__init__(own, ranks)
        self._others, self._page_bytes = tuple(others), page_bytes
        self._writes: dict[Key, dict[int, bool]] = {}

    @property
    def store(self) -> PageFiles:
        return self._own.store

    @property
    def others(self) -> Sequence[PageFiles]:
        return self._others

    @property
    def num_pages(self) -> int:
        return self._own.num_pages

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    @property
    def takes_writes(self) -> bool:
        from kvant.kv.offload.files import MOST_WRITING

        waiting = sum(self._page_bytes[key.group] for key in self._writes)
        return self._own.takes_writes and waiting < MOST_WRITING

    def counted(self, counts: TierCounts) -> TierCounts:
        return self._own.counted(counts)

    def read(self, reads: Iterable[tuple[Key, int]]) -> None:
        found = list(reads)
        self._reads.update({key: {} for key, _ in found})
        self._ranks.send(ReadFiles([(*key, page) for key, page in found]))
        self._own.read(found)

    def take_read(self) -> list[tuple[Key, bytes | None, float]]:
        found = super().take_read()
        for key, total, _ in found:
            if total is None:
                self._drop(key)  # parts of some ranks alone are of no use
        return found

    def write(self, writes: Iterable[tuple[Key, int, bytes]]) -> None:
        found = []
        for key, page, total in writes:
            self._writes[key] = {}
            self._own.write([(key, page, part_of(total, 0))])
            found.append((*key, page, total))
        if found:
            self._ranks.send(WriteFiles(found))

    def take_written(self) -> list[tuple[Key, bool]]:
        self._take_messages()
        for key, is_written in self._own.take_written():
            self._writes[key][0] = is_written
        found = []
        for key, parts in taken(self._writes, self._size):
            is_whole = all(parts.values())
            if not is_whole and any(parts.values()):
                self._drop(key)
            found.append((key, is_whole))
        return found

    def touch(self, keys: Sequence[Key]) -> None:
        if any(self.has(key) for key in keys):
            self._own.touch(keys)
            self._ranks.send(TouchFiles(keys))

    def forget(self, key: Key) -> None:
        if self.has(key):
            self._drop(key)

    def forget_own(self) -> None:
        self._own.forget_own()
        self._ranks.send(ForgetFiles(()))

    def _drop(self, key: Key) -> None:
        self._own.forget(key)
        self._ranks.send(ForgetFiles((key,)))

    def _take_messages(self) -> None:
        for rank, message in emptied(self._ranks.inbox.files):
            self._note_reads(rank, message)
            for group, digest, is_written in message.writes:
                self._writes[Key(group, digest)][rank] = is_written


def emptied(queue: deque[_T]) -> list[_T]:
    """Removes and returns what other threads appended so far."""
    found = []
    while queue:
        found.append(queue.popleft())
    return found


def taken(waiting: dict[Key, dict[int, _T]], size: int) -> list[tuple[Key, dict[int, _T]]]:
    """Removes and returns the entries for which every rank has answered."""
    whole = [key for key, parts in waiting.items() if len(parts) == size]
    return [(key, waiting.pop(key)) for key in whole]
