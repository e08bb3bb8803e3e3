"""Short messages from rank 0 to the other ranks through memory that all of them map.

A write costs rank 0 no system call while ranks are awake: they look for the next message by themselves,
first without a pause, then with short ones. A rank without work for a while blocks on its link, and rank 0
wakes it there. Long messages take the link, too; the ring then holds their place in the order.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

SLOT_BYTES = 1 << 18
NUM_SLOTS = 16

IDLE_SECONDS = 0.05
"""A rank that found nothing for so long blocks on its link."""

_NAP_SECONDS = 50e-6
_BLOCK_SECONDS = 0.1
"""A rank looks again after so long even if the call that wakes it was lost."""

_LINE = 8  # words of a cache line: no two processes write to one
_HEAD_BYTES = mmap.PAGESIZE
MOST_READERS = _HEAD_BYTES // (8 * _LINE) // 2 - 1

Link: TypeAlias = "Connection[bytes, bytes]"
Payload: TypeAlias = "bytes | NDArray[np.int64]"

_lock = threading.Lock()


def _fence() -> None:
    """Let other processors see what was stored before anything that follows is loaded or stored."""
    with _lock:
        pass
    with _lock:
        pass


class _Memory:
    """The mapped file: a page of counters, then the slots.

    counters: word 0 is the number of messages written. The word `read(i)` is the number that reader i has
    taken, and the word `asleep(i)` tells whether it must be woken. Each slot begins with its message's
    length in bytes, -1 for one that takes the link.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _HEAD_BYTES + NUM_SLOTS * SLOT_BYTES)
        self.counters = memoryview(self._map)[:_HEAD_BYTES].cast("q")
        words = SLOT_BYTES // 8
        slots = memoryview(self._map)[_HEAD_BYTES:]
        self.lengths = slots.cast("q")[::words]
        self.bodies = [slots[at + 8 : at + SLOT_BYTES] for at in range(0, len(slots), SLOT_BYTES)]

    @staticmethod
    def read(reader: int) -> int:
        return (1 + 2 * reader) * _LINE

    @staticmethod
    def asleep(reader: int) -> int:
        return (2 + 2 * reader) * _LINE


class Ring:
    """Rank 0's side. fd: of the memory, which readers map. check: raises once a reader was lost."""

    def __init__(self, num_readers: int, check: Callable[[], None]) -> None:
        assert num_readers <= MOST_READERS
        self.fd = os.memfd_create("kvant-steps")
        os.ftruncate(self.fd, _HEAD_BYTES + NUM_SLOTS * SLOT_BYTES)
        self._memory = _Memory(self.fd)
        self._check = check
        self._written = 0
        self._reads = [_Memory.read(reader) for reader in range(num_readers)]
        self._asleep = [_Memory.asleep(reader) for reader in range(num_readers)]

    def send(self, payload: Payload, links: Sequence[Link]) -> int | None:
        """Send to every reader; their links in their order. Waits while a reader is NUM_SLOTS behind.

        Returns the reader whose link is broken, if there is one.
        """
        memory, written = self._memory, self._written
        counters, slot = memory.counters, written % NUM_SLOTS
        while written - min(counters[read] for read in self._reads) >= NUM_SLOTS:
            self._check()
            time.sleep(_NAP_SECONDS)
        data = memoryview(cast("bytes", payload)).cast("B")
        size = len(data)
        is_long = size > SLOT_BYTES - 8
        if not is_long:
            memory.bodies[slot][:size] = data
        memory.lengths[slot] = -1 if is_long else size
        _fence()
        self._written = counters[0] = written + 1
        _fence()
        for reader, asleep in enumerate(self._asleep):
            try:
                if counters[asleep]:
                    links[reader].send_bytes(b"")
                if is_long:
                    links[reader].send_bytes(data)
            except OSError:
                return reader
        return None

    def close_file(self) -> None:
        """Readers have mapped it or got their own number of it; the memory goes with the last of them."""
        os.close(self.fd)


class RingReader:
    """Another rank's side. fd: the ring's, which is closed. spin_seconds: to look without a pause."""

    def __init__(self, fd: int, reader: int, link: Link, *, spin_seconds: float) -> None:
        self._memory = _Memory(fd)
        os.close(fd)
        self._read, self._asleep = _Memory.read(reader), _Memory.asleep(reader)
        self._link, self._spin_seconds = link, spin_seconds
        self._count = 0
        self._long: deque[bytes] = deque()

    def receive(self) -> bytes:
        """The next message. Raises EOFError or OSError once rank 0 has closed the link."""
        memory, count = self._memory, self._count
        if memory.counters[0] == count:
            self._wait(count)
        _fence()
        slot = count % NUM_SLOTS
        length = memory.lengths[slot]
        data = None if length < 0 else memory.bodies[slot][:length].tobytes()
        _fence()
        self._count = memory.counters[self._read] = count + 1
        if data is not None:
            return data
        while not self._long:
            self._take_from_link()
        return self._long.popleft()

    def _wait(self, count: int) -> None:
        counters = self._memory.counters
        began = time.perf_counter()
        while counters[0] == count:
            waited = time.perf_counter() - began
            if waited < self._spin_seconds:
                continue
            if waited < IDLE_SECONDS:
                time.sleep(_NAP_SECONDS)
                continue
            counters[self._asleep] = 1
            _fence()
            if counters[0] == count and self._link.poll(_BLOCK_SECONDS):
                self._take_from_link()
        counters[self._asleep] = 0

    def _take_from_link(self) -> None:
        """Empty messages only wake."""
        if data := self._link.recv_bytes():
            self._long.append(data)


class LinkSender:
    """`Ring` where ranks may be on other machines: each message takes every link."""

    def send(self, payload: Payload, links: Sequence[Link]) -> int | None:
        """As `Ring.send`."""
        data = memoryview(cast("bytes", payload)).cast("B")
        for reader, link in enumerate(links):
            try:
                link.send_bytes(data)
            except OSError:
                return reader
        return None


class LinkReader:
    """Another rank's side of `LinkSender`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def receive(self) -> bytes:
        """As `RingReader.receive`."""
        return self._link.recv_bytes()
