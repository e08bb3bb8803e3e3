"""Messages through mapped memory arrive whole and in order, short and long, to ranks awake or asleep."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import Pipe

import numpy as np
import pytest

from kvant.errors import RankLost
from kvant.parallel import ring as rings
from kvant.parallel.ring import Link, Ring, RingReader


def _never_lost() -> None:
    """Every reader lives."""


def _pair(num_readers: int = 1) -> tuple[Ring, list[Link], list[RingReader]]:
    ring = Ring(num_readers, _never_lost)
    ends = [Pipe() for _ in range(num_readers)]
    readers = [
        RingReader(os.dup(ring.fd), i, theirs, spin_seconds=0.0)
        for i, (_, theirs) in enumerate(ends)
    ]
    ring.close_file()
    return ring, [ours for ours, _ in ends], readers


def _messages() -> list[bytes]:
    drawn = np.random.default_rng(1)
    sizes = [8, 64, 9000, rings.SLOT_BYTES - 8, rings.SLOT_BYTES, 3 * rings.SLOT_BYTES]
    return [drawn.bytes(int(size)) for size in drawn.choice(sizes, 80)]


def test_readers_get_all_messages_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "IDLE_SECONDS", 0.002)
    ring, links, readers = _pair(2)
    sent, got = _messages(), [list[bytes]() for _ in readers]

    def read(place: int) -> None:
        got[place] += [readers[place].receive() for _ in sent]

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for turn, data in enumerate(sent):
        if turn % 13 == 0:
            time.sleep(0.01)  # readers fall asleep
        assert ring.send(data, links) is None
    for thread in threads:
        thread.join(20)
    assert got == [sent, sent]


def test_a_sleeping_reader_is_woken_and_one_that_runs_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rings, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(rings, "_BLOCK_SECONDS", 60.0)
    ring, links, (reader,) = _pair()
    assert ring.send(np.arange(3), links) is None
    assert not reader._link.poll()  # nothing but the memory was touched
    assert np.frombuffer(reader.receive(), np.int64).tolist() == [0, 1, 2]
    found = []
    thread = threading.Thread(target=lambda: found.append(reader.receive()), daemon=True)
    thread.start()
    while not ring._memory.counters[reader._asleep]:
        time.sleep(0.001)
    assert ring.send(b"wake up!", links) is None
    thread.join(10)
    assert found == [b"wake up!"]


def test_a_reader_ends_with_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "IDLE_SECONDS", 0.0)
    _, (link,), (reader,) = _pair()
    link.close()
    with pytest.raises((EOFError, OSError)):
        reader.receive()


def test_a_reader_that_never_reads_stops_rank_0_until_it_is_lost() -> None:
    ring, links, _ = _pair()
    for _ in range(rings.NUM_SLOTS):
        ring.send(b"12345678", links)

    def lost() -> None:
        raise RankLost("rank 1 hangs")

    ring._check = lost
    with pytest.raises(RankLost):
        ring.send(b"12345678", links)
