"""Ranks as threads of one process: for tests of what each rank computes, without engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from kvant.models.sharding.shard import Shard

T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.parts: list[Tensor | None] = [None] * size


class ThreadGroup:
    """`Group` of one rank among threads."""

    def __init__(self, shard: Shard, meeting: _Meeting) -> None:
        self.shard, self._meeting = shard, meeting

    @contextmanager
    def alone(self) -> Iterator[None]:
        raise AssertionError("nothing is compiled here")
        yield

    def sum(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for part in self._parts(x):
            total += part
        return total.to(x.dtype)

    def sum_add_norm(self, *_: object) -> None:
        return None

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._parts(x), -1)

    def _parts(self, x: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.parts[self.shard.rank] = x.clone()
        meeting.barrier.wait()
        found = [part for part in meeting.parts if part is not None]
        meeting.barrier.wait()
        return found


def by_all(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What each of `size` ranks makes of `work`, at the same time."""
    meeting = _Meeting(size)
    groups = [ThreadGroup(Shard(rank, size), meeting) for rank in range(size)]

    def run(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, groups))
