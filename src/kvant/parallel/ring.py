"""A ring buffer in shared memory, through which rank 0 sends short messages to the other ranks.

While ranks are awake, a write needs no system call: they poll for the next message, first without a pause,
then with short ones. A rank that is idle for a while blocks on its link, and rank 0 wakes it there. Long
messages are sent over the link; an entry in the ring keeps their place in the order.
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
"""Seconds of polling without a message after which a rank blocks on its link."""

_NAP_SECONDS = 50e-6
_BLOCK_SECONDS = 0.1
"""The longest wait on the link before a rank polls again, in case the wake-up was lost."""

_LINE = 8  # words of a cache line: no two processes write to one
_HEAD_BYTES = mmap.PAGESIZE
MOST_READERS = _HEAD_BYTES // (8 * _LINE) // 2

_LENGTH_BITS = 20
_LONG = (1 << _LENGTH_BITS) - 1
"""In place of the length of a message that is sent over the link."""

Link: TypeAlias = "Connection[bytes, bytes]"
Payload: TypeAlias = "bytes | NDArray[np.int64]"

_lock = threading.Lock()


def _fence() -> None:
    """A full memory barrier: orders all loads and stores before it before those after it."""
    with _lock:
        pass
    with _lock:
        pass


class _Memory:
    """The mapped file: a page of counters, then the slots.

    counters: the word `read(i)` is the number of messages that reader i has taken. The word `asleep(i)` is 1
    while that reader must be woken. headers: the first word of each slot has the number of its message, from
    1, and in the low bits the length in bytes. So one load tells a reader whether its next message is there,
    and how long it is.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _HEAD_BYTES + NUM_SLOTS * SLOT_BYTES)
        self.counters = memoryview(self._map)[:_HEAD_BYTES].cast("q")
        words = SLOT_BYTES // 8
        slots = memoryview(self._map)[_HEAD_BYTES:]
        self.headers = slots.cast("q")[::words]
        self.bodies = [slots[at + 8 : at + SLOT_BYTES] for at in range(0, len(slots), SLOT_BYTES)]

    @staticmethod
    def read(reader: int) -> int:
        return 2 * reader * _LINE

    @staticmethod
    def asleep(reader: int) -> int:
        return (2 * reader + 1) * _LINE


class Ring:
    """Rank 0's side of the ring. fd: descriptor of the shared memory. check: raises if a reader was lost."""

    def __init__(self, num_readers: int, check: Callable[[], None]) -> None:
        assert num_readers <= MOST_READERS
        self.fd = os.memfd_create("kvant-steps")
        os.ftruncate(self.fd, _HEAD_BYTES + NUM_SLOTS * SLOT_BYTES)
        self._memory = _Memory(self.fd)
        self._check = check
        self._written = 0
        self._least = 0  # messages that every reader had taken when this was last looked up
        self._reads = [_Memory.read(reader) for reader in range(num_readers)]
        self._asleep = [_Memory.asleep(reader) for reader in range(num_readers)]

    def send(self, payload: Payload, links: Sequence[Link]) -> int | None:
        """Sends to every reader. Waits while a reader is NUM_SLOTS messages behind.

        links: the readers' links, in order. Returns the index of a reader whose link is broken, or None.
        """
        memory, written = self._memory, self._written
        counters, slot = memory.counters, written % NUM_SLOTS
        while written - self._least >= NUM_SLOTS:
            self._least = min(counters[read] for read in self._reads)
            if written - self._least >= NUM_SLOTS:
                self._check()
                time.sleep(_NAP_SECONDS)
        data = memoryview(cast("bytes", payload)).cast("B")
        size = len(data)
        is_long = size > SLOT_BYTES - 8
        if not is_long:
            memory.bodies[slot][:size] = data
        _fence()
        self._written = written + 1
        memory.headers[slot] = self._written << _LENGTH_BITS | (_LONG if is_long else size)
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
        """Closes the descriptor after every reader got its own. The last mapping keeps the memory alive."""
        os.close(self.fd)


class RingReader:
    """Another rank's side. fd: its descriptor, which is closed. spin_seconds: to poll without a pause."""

    def __init__(self, fd: int, reader: int, link: Link, *, spin_seconds: float) -> None:
        self._memory = _Memory(fd)
        os.close(fd)
        self._read, self._asleep = _Memory.read(reader), _Memory.asleep(reader)
        self._link, self._spin_seconds = link, spin_seconds
        self._count = 0
        self._long: deque[bytes] = deque()

    def receive(self) -> bytes:
        """Waits for the next message. Raises EOFError or OSError once rank 0 has closed the link."""
        memory, number = self._memory, self._count + 1
        slot = self._count % NUM_SLOTS
        length = self._wait(slot, number) & _LONG
        _fence()
        data = None if length == _LONG else memory.bodies[slot][:length].tobytes()
        _fence()
        self._count = memory.counters[self._read] = number
        if data is not None:
            return data
        while not self._long:
            self._take_from_link()
        return self._long.popleft()

    def _wait(self, slot: int, number: int) -> int:
        """Returns the header of the message with this number, once it is in its slot."""
        headers, counters = self._memory.headers, self._memory.counters
        header, began, slept = headers[slot], 0.0, False
        while header >> _LENGTH_BITS != number:
            now = time.perf_counter()
            began = began or now
            waited = now - began
            if waited >= IDLE_SECONDS:
                counters[self._asleep], slept = 1, True
                _fence()
                if headers[slot] == header and self._link.poll(_BLOCK_SECONDS):
                    self._take_from_link()
            elif waited >= self._spin_seconds:
                time.sleep(_NAP_SECONDS)
            header = headers[slot]
        if slept:
            counters[self._asleep] = 0
        return header

    def _take_from_link(self) -> None:
        """Receives a long message. An empty message only wakes this rank and is dropped."""
        if data := self._link.recv_bytes():
            self._long.append(data)


class LinkSender:
    """Replaces `Ring` if ranks may be on other machines: sends each message over every link."""

    def send(self, payload: Payload, links: Sequence[Link]) -> int | None:
        """Sends like `Ring.send`."""
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
        """Receives like `RingReader.receive`."""
        return self._link.recv_bytes()
