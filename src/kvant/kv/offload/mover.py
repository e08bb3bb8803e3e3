"""Copies of pages between a device's pools and host memory, by two threads: one stores, one loads.

In host memory a page is one contiguous piece: its bytes in all layers of all pools that share its id. The
code calls this piece a row. On a CPU a copy is a copy of memory. On a GPU, pages are gathered into a buffer
of the device and cross the bus as a few large copies, on a stream of their own. A step that runs meanwhile
does not wait for them.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvant.errors import DoesNotFit, WayOut
from kvant.kv.memory import format_size
from kvant.kv.offload.moves import Bell, Move, Moved
from kvant.kv.offload.page_files import checksum
from kvant.kv.pool import KVPool, zeros

CHUNK_BYTES = 16 << 20
"""Bytes that one copy over the bus moves at most, and of each buffer on a GPU; at least a page."""

_CHECKED_BYTES = 8 << 20
"""Bytes whose checksums one task computes at most: several threads work for the chunk that is next."""

_log = logging.getLogger(__name__)
_HASHERS = min(8, os.cpu_count() or 1)


class HostRows:
    """The memory of a host tier: rows of every group, over the same bytes.

    row_bytes: used bytes of a page of each group. num_superblocks, superblock_bytes, per_superblock: how the
    memory is cut, as an arena is. Raises DoesNotFit if a GPU cannot reach that much memory.
    """

    def __init__(
        self,
        row_bytes: Sequence[int],
        num_superblocks: int,
        superblock_bytes: int,
        per_superblock: Sequence[int],
        *,
        pinned: bool,
    ) -> None:
        self.row_bytes, self.num_superblocks = tuple(row_bytes), num_superblocks
        num_bytes = num_superblocks * superblock_bytes
        try:
            self.bytes = zeros((num_bytes,), torch.uint8, torch.device("cpu"))
        except MemoryError:
            raise _too_much(num_bytes, "cannot be allocated", "the system refuses") from None
        self.is_pinned = pinned
        if pinned:
            _pin(self.bytes)
            weakref.finalize(self, _unpin, self.bytes.data_ptr())
        self.groups = [
            self.bytes.view(num_superblocks * count, superblock_bytes // count)[:, :size]
            for count, size in zip(per_superblock, row_bytes, strict=True)
        ]
        self._all = memoryview(self.bytes.numpy().data)
        self._strides = [superblock_bytes // count for count in per_superblock]

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.bytes.data_ptr()

    def stride(self, group: int) -> int:
        """Bytes from a page of a group to the next one."""
        return self._strides[group]

    def row(self, group: int, page: int) -> memoryview:
        """Returns a page's bytes."""
        first = page * self._strides[group]
        return self._all[first : first + self.row_bytes[group]]


class Copier(Protocol):
    """Copies chunks of pages; used by one thread. `mark` was made by the engine's thread."""

    def mark(self) -> object:
        """Marks the end of what was launched so far."""
        ...

    def begin(self, mark: object) -> None:
        """Makes the copies that follow wait for `mark`."""
        ...

    def store(self, group: int, pages: list[int], rows: list[int]) -> Callable[[], None]:
        """Begins to copy pages of the device into rows; the result waits until they are there."""
        ...

    def load(self, group: int, pages: list[int], rows: list[int]) -> Callable[[], None]:
        """Begins to copy rows into pages of the device; the result waits until they are there."""
        ...


class MemoryCopier:
    """Copies pages on a CPU. Copies are done when they return.

    pieces: uint8 [num_pages, n] each, by group.
    """

    def __init__(self, pieces: Sequence[Sequence[Tensor]], rows: HostRows) -> None:
        self._pieces, self._rows = pieces, rows

    def mark(self) -> object:
        return None

    def begin(self, mark: object) -> None:
        pass

    def store(self, group: int, pages: list[int], rows: list[int]) -> Callable[[], None]:
        index, target = torch.tensor(pages), torch.tensor(rows)
        at = 0
        for piece in self._pieces[group]:
            size = piece.shape[1]
            taken = piece.index_select(0, index)
            self._rows.groups[group][:, at : at + size].index_copy_(0, target, taken)
            at += size
        return _nothing

    def load(self, group: int, pages: list[int], rows: list[int]) -> Callable[[], None]:
        index, target = torch.tensor(rows), torch.tensor(pages)
        at = 0
        for piece in self._pieces[group]:
            size = piece.shape[1]
            taken = self._rows.groups[group][:, at : at + size].index_select(0, index)
            piece.index_copy_(0, target, taken)
            at += size
        return _nothing


class PageMover:
    """A `Mover` over the pools that share page ids.

    make_copier: one for each of both threads.
    """

    def __init__(self, rows: HostRows, make_copier: Callable[[], Copier], bell: Bell) -> None:
        self._rows, self._bell = rows, bell
        self._storing, self._loading = make_copier(), make_copier()
        self._stores = ThreadPoolExecutor(1, "kvant-store")
        self._loads = ThreadPoolExecutor(1, "kvant-load")
        self._ends = ThreadPoolExecutor(1, "kvant-loaded")
        self._last_end = 0.0
        self._checks = ThreadPoolExecutor(1, "kvant-check")
        self._hashers = ThreadPoolExecutor(_HASHERS, "kvant-checksum")
        self._done: deque[Moved] = deque()

    @property
    def rows(self) -> HostRows:
        """The host memory."""
        return self._rows

    @property
    def page_bytes(self) -> Sequence[int]:
        return self._rows.row_bytes

    def row(self, group: int, host_page: int) -> memoryview:
        return self._rows.row(group, host_page)

    def store(self, job: int, moves: Sequence[Move]) -> None:
        mark = self._storing.mark()
        self._stores.submit(self._guarded, self._store, job, tuple(moves), mark)

    def load(self, job: int, moves: Sequence[Move]) -> None:
        mark, chunks = self._loading.mark(), self._chunks(moves)
        # Before the jobs in front are done: pages are checked while others cross the bus.
        checked = self._checks.submit(self._check, moves, chunks)
        work = partial(self._load, chunks, checked)
        self._loads.submit(self._guarded, work, job, tuple(moves), mark)

    def take(self) -> list[Moved]:
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    # -- in threads ----------------------------------------------------------------------------

    def _guarded(
        self, work: Callable[[int, tuple[Move, ...], object], Moved | None],
        job: int, moves: tuple[Move, ...], mark: object,
    ) -> None:  # fmt: skip
        """Runs a job, or its first half, which returns None. After a fault no page of it may be used."""
        try:
            done = work(job, moves, mark)
        except BaseException as fault:
            _log.debug("pages were not copied", exc_info=True)
            text = str(fault).partition("\n")[0]
            why = f"{type(fault).__name__}: {text}" if text else type(fault).__name__
            done = Moved(job, (None,) * len(moves), 0, 0.0, why)
        if done is not None:
            self._done.append(done)
            self._bell.ring()

    def _store(self, job: int, moves: tuple[Move, ...], mark: object) -> Moved:
        started = time.perf_counter()
        self._storing.begin(mark)
        waits: list[tuple[Callable[[], None], list[int]]] = []
        for group, places in self._chunks(moves):
            pages = [moves[place].device_page for place in places]
            rows = [moves[place].host_page for place in places]
            waits.append((self._storing.store(group, pages, rows), places))
        hashed: list[Future[list[bytes]]] = []
        for wait, places in waits:
            wait()  # checksums of one chunk are made while the next one crosses the bus
            hashed.append(self._hashers.submit(self._sums, moves, places))
        sums: list[bytes | None] = [None] * len(moves)
        for (_, places), found in zip(waits, hashed, strict=True):
            for place, total in zip(places, found.result(), strict=True):
                sums[place] = total
        return self._moved(job, moves, sums, started)

    def _load(
        self, chunks: list[tuple[int, list[int]]], checked: Future[list[list[Future[list[bytes]]]]],
        job: int, moves: tuple[Move, ...], mark: object,
    ) -> None:  # fmt: skip
        """Begins the copies of a job. Another thread waits for them, so the bus goes on with the next job."""
        started = time.perf_counter()
        self._loading.begin(mark)
        sums: list[bytes | None] = [None] * len(moves)
        waits: list[Callable[[], None]] = []
        for (group, places), parts in zip(chunks, checked.result(), strict=True):
            totals = itertools.chain.from_iterable(part.result() for part in parts)
            good = [
                place
                for place, total in zip(places, totals, strict=True)
                if total == moves[place].checksum
            ]
            for place in good:
                sums[place] = moves[place].checksum
            if good:
                pages = [moves[place].device_page for place in good]
                rows = [moves[place].host_page for place in good]
                waits.append(self._loading.load(group, pages, rows))
        end = partial(self._loaded, waits, sums, started)
        self._ends.submit(self._guarded, end, job, moves, None)

    def _loaded(
        self, waits: Sequence[Callable[[], None]], sums: Sequence[bytes | None], started: float,
        job: int, moves: tuple[Move, ...], _mark: object,
    ) -> Moved:  # fmt: skip
        for wait in waits:
            wait()
        started = max(
            started, self._last_end
        )  # before that, the copies waited for those of other jobs
        self._last_end = time.perf_counter()
        return self._moved(job, moves, sums, started)

    def _check(
        self, moves: Sequence[Move], chunks: list[tuple[int, list[int]]]
    ) -> list[list[Future[list[bytes]]]]:
        """Begins to compute checksums. A thread does it: waking others takes the engine's thread long."""
        found = []
        for group, places in chunks:
            most = max(1, _CHECKED_BYTES // max(1, self.page_bytes[group]))
            parts = [places[at : at + most] for at in range(0, len(places), most)]
            found.append([self._hashers.submit(self._sums, moves, part) for part in parts])
        return found

    def _chunks(self, moves: Sequence[Move]) -> list[tuple[int, list[int]]]:
        """Places of moves of one group whose rows fit into a chunk."""
        found: list[tuple[int, list[int]]] = []
        for place, move in enumerate(moves):
            most = max(1, CHUNK_BYTES // max(1, self.page_bytes[move.group]))
            if not found or found[-1][0] != move.group or len(found[-1][1]) >= most:
                found.append((move.group, []))
            found[-1][1].append(place)
        return found

    def _sums(self, moves: Sequence[Move], places: Sequence[int]) -> list[bytes]:
        return [checksum(self.row(moves[place].group, moves[place].host_page)) for place in places]

    def _moved(
        self, job: int, moves: Sequence[Move], sums: Sequence[bytes | None], started: float
    ) -> Moved:
        size = sum(self.page_bytes[move.group] for move in moves)
        return Moved(job, tuple(sums), size, time.perf_counter() - started)


def pieces_of(pools: Sequence[KVPool]) -> list[list[Tensor]]:
    """Returns the pieces of a page in all pools that share page ids, by group: uint8 [num_pages, n] each."""
    arenas = list({id(pool.arena): pool.arena for pool in pools}.values())
    groups = range(len(arenas[0].layout.groups))
    return [
        [
            piece
            for arena in arenas
            if group < len(arena.layout.groups)  # a drafter's own arena has no states
            for piece in arena.pieces(group)
        ]
        for group in groups
    ]


def _nothing() -> None:
    pass


def _pin(memory: Tensor) -> None:
    """Lets a GPU copy from and to this memory directly."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise _too_much(
            memory.numel(),
            "cannot be locked for copies to the GPU",
            f"cudaHostRegister answers {status}; the limit may be that of the container or `ulimit -l`",
        )


def _too_much(num_bytes: int, what: str, why: str) -> DoesNotFit:
    return DoesNotFit(
        f"{format_size(num_bytes)} of host memory {what}",
        why=why,
        ways_out=(WayOut("offload to less", ("--kv-offload", f"host:{num_bytes // 2}")),),
    )


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
