"""What tiers ask of the code that moves bytes, and what they are told. No tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

SUM_BYTES = 16
"""Bytes of the checksum of a rank's part of a page; see `kvant.kv.offload.page_files`."""


def part_of(checksums: bytes, rank: int) -> bytes:
    """Returns the checksum of a rank's part. checksums: those of all ranks, concatenated."""
    return checksums[SUM_BYTES * rank : SUM_BYTES * (rank + 1)]


class Key(NamedTuple):
    """A page's contents: of a group, by hash."""

    group: int
    digest: bytes


class Move(NamedTuple):
    """One page of a group, between the device and host memory.

    checksum: of the page in host memory, to be checked before it is loaded; empty for a page to store.
    """

    group: int
    device_page: int
    host_page: int
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class Moved:
    """A finished job. checksums: of each page in host memory; None for a page that is not what it was.

    fault: why nothing was copied, in words; then every checksum is None. num_bytes, seconds: what was copied
    and how long it took, waiting in the queue not counted.
    """

    job: int
    checksums: tuple[bytes | None, ...]
    num_bytes: int
    seconds: float
    fault: str = ""


class Mover(Protocol):
    """Moves pages in the background; every method returns at once.

    The device's pages must keep their owner until the job is done, or the caller must notice that they
    lost it (`PageAllocator.generation_of`). Pages in host memory must be held.
    """

    @property
    def page_bytes(self) -> Sequence[int]:
        """Bytes that a page of each group takes in host memory."""
        ...

    def store(self, job: int, moves: Sequence[Move]) -> None:
        """Copies pages from the device to host memory, after everything that was launched so far."""
        ...

    def load(self, job: int, moves: Sequence[Move]) -> None:
        """Checks pages in host memory and copies the good ones to the device, also after all launches."""
        ...

    def take(self) -> list[Moved]:
        """Jobs that finished since the last call."""
        ...

    def row(self, group: int, host_page: int) -> memoryview:
        """Returns the bytes of a page in host memory, to be read or written by the holder of the page."""
        ...


class Bell:
    """Rung by threads that finished something; the engine's thread waits for it when it has nothing else."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Waits until it was rung since the last call, `seconds` at most."""
        self._event.wait(seconds)
        self._event.clear()
