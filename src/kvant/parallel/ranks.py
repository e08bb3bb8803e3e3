"""The processes of ranks 1 and up, from outside: starts them, sends to them, notices when one is lost."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvant.errors import RankLost
from kvant.parallel.messages import (
    Answer,
    Failed,
    FilesDone,
    Loaded,
    PagesMoved,
    Start,
    ToRank,
    encode,
    encode_to_rank,
    read_from_rank,
)
from kvant.parallel.ring import LinkSender, Payload, Ring

SILENT_SECONDS = 8.0
"""A rank that has said nothing for so long is taken for hanging. It says every second that it lives."""

_CHECK_SECONDS = 0.5
_END_SECONDS = 2.0
_log = logging.getLogger(__name__)


class Process(Protocol):
    """What is needed of a process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        ...


class Joined(Process, Protocol):
    """A rank that was started elsewhere, with its two connections."""

    @property
    def number(self) -> int: ...

    @property
    def link(self) -> Connection[bytes, bytes]: ...

    @property
    def pulse(self) -> socket.socket: ...


@dataclass(eq=False)
class _Rank:
    """A thread reads `link`. answers: what it read, and None at the end of the link, which is also `ended`.

    last_words: why the rank ends, if it said so.
    """

    number: int
    process: Process
    link: Connection[bytes, bytes]
    pulse: socket.socket
    heard: float
    answers: SimpleQueue[Answer | None] = field(default_factory=SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)
    last_words: str | None = None


@dataclass(eq=False)
class Told:
    """What ranks say about pages unasked, each with the rank's number. ring: called after each."""

    moved: deque[tuple[int, PagesMoved]] = field(default_factory=deque)
    files: deque[tuple[int, FilesDone]] = field(default_factory=deque)
    ring: Callable[[], None] = lambda: None


class Ranks:
    """Ranks 1 .. size - 1, in processes of their own. Not thread-safe, except for the watching inside.

    on_loss: called once by another thread when a rank was lost; all ranks have been killed then. on_end:
    called once all ranks have ended with the engine.
    """

    def __init__(
        self,
        on_loss: Callable[[str], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvant-ranks-"))
        self._ranks: list[_Rank] = []
        self._ring: Ring | LinkSender
        self.told = Told()
        self._life = _Life(on_loss)
        self._finalizer = weakref.finalize(
            self, _end, self._ranks, self._life, self.directory, os.getpid(), on_end
        )

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def start(self, starts: Sequence[Start], joined: Sequence[Joined] = ()) -> None:
        """Start a process for each; they load their weights from now on.

        joined: ranks that were started elsewhere, in their order.
        """
        if joined:
            now = time.monotonic()
            for one, start in zip(joined, starts, strict=True):
                rank = _Rank(one.number, one, one.link, one.pulse, now)
                self._ranks.append(rank)
                rank.link.send_bytes(encode(start))
            self._ring = LinkSender()
        else:
            for start in starts:
                self._ranks.append(_start(start.shard.rank))
            self._ring = ring = Ring(len(starts), self._life.check)
            for rank, start in zip(self._ranks, starts, strict=True):
                reduction.send_handle(rank.link, ring.fd, rank.process.pid)
                rank.link.send_bytes(encode(start))
            ring.close_file()
        for name, work in (
            ("kvant-ranks", partial(_watch, self._ranks, self._life)),
            ("kvant-ranks-told", partial(_listen, self._ranks, self._life, self.told)),
        ):
            threading.Thread(target=work, name=name, daemon=True).start()

    def wait_loaded(self) -> None:
        """Wait until the weights of all ranks are on their devices. Raises RankLost."""
        for answer in self.answers():
            assert isinstance(answer, Loaded)

    def send(self, message: ToRank) -> None:
        """To every rank. Raises RankLost."""
        self._send(encode_to_rank(message))

    def send_array(self, numbers: NDArray[np.int64]) -> None:
        """To every rank: what `kvant.parallel.mirror` made. Raises RankLost."""
        self._send(numbers)

    def _send(self, payload: Payload) -> None:
        self.check()
        broken = self._ring.send(payload, [rank.link for rank in self._ranks])
        if broken is not None:
            raise self._lost(self._ranks[broken])

    def answers(self) -> list[Answer]:
        """One answer of every rank, in their order. Raises RankLost."""
        found = []
        for rank in self._ranks:
            answer = rank.answers.get()
            if answer is None:
                raise self._lost(rank)
            found.append(answer)
        return found

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        self._life.check()

    def explain(self, fault: BaseException) -> None:
        """Raise RankLost if a collective's `fault` comes from a lost rank, which may be seen later."""
        end = time.monotonic() + _END_SECONDS
        while self._life.fault is None and time.monotonic() < end:
            time.sleep(0.02)
        if self._life.fault is not None:
            raise RankLost(self._life.fault) from fault

    def close(self) -> None:
        """End all ranks and wait for them."""
        self._finalizer()

    def _lost(self, rank: _Rank) -> RankLost:
        said = _last_words(rank)
        self._life.lose(self._ranks, said or f"rank {rank.number} (pid {rank.process.pid}) ended")
        assert self._life.fault is not None
        return RankLost(self._life.fault)


class _Life:
    """Whether ranks are well, shared with the watching thread. fault: why not."""

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        self.fault: str | None = None
        self.is_closing = False
        self._on_loss = on_loss
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        if self.fault is not None:
            raise RankLost(self.fault)

    def lose(self, ranks: Sequence[_Rank], fault: str) -> None:
        """Note the first fault; kill all ranks, since none can go on without the others."""
        with self._lock:
            if self.fault is not None or self.is_closing:
                return
            self.fault = fault
        _log.error("%s; the engine cannot go on", fault)
        for rank in ranks:
            rank.process.kill()
        self._on_loss(fault)


def spawn(link: socket.socket, pulse: socket.socket, *more: int) -> Process:
    """Start a rank's process with its ends of the two sockets. more: arguments of `rank_process`."""
    fds = link.fileno(), pulse.fileno()
    command = [sys.executable, "-P", "-m", "kvant.parallel.rank_process", *map(str, fds + more)]
    # A session of its own: an interrupt at the terminal is for rank 0 alone.
    return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)


def _start(number: int) -> _Rank:
    link, its_link = socket.socketpair()
    pulse, its_pulse = socket.socketpair()
    process = spawn(its_link, its_pulse)
    its_link.close()
    its_pulse.close()
    return _Rank(number, process, Connection(link.detach()), pulse, time.monotonic())


def _watch(ranks: Sequence[_Rank], life: _Life) -> None:
    """Until the end: listen to every rank's pulse. Before a rank's first pulse it may be silent."""
    silent = {rank.number for rank in ranks}
    while life.fault is None and not life.is_closing:
        by_pulse = {rank.pulse: rank for rank in ranks}
        try:
            ready = wait(list(by_pulse), _CHECK_SECONDS)
        except OSError:
            return  # closed by the end
        now = time.monotonic()
        for pulse in ready:
            rank = by_pulse[pulse]  # type: ignore[index]
            try:
                alive = bool(rank.pulse.recv(4096))
            except OSError:
                alive = False
            rank.heard = now
            silent.discard(rank.number)
            if not alive and not life.is_closing:
                life.lose(ranks, _last_words(rank) or _death(rank))
                return
        for rank in ranks:
            if rank.number not in silent and now - rank.heard > SILENT_SECONDS:
                life.lose(
                    ranks,
                    f"rank {rank.number} (pid {rank.process.pid}) hangs: "
                    f"silent for {now - rank.heard:.0f} s",
                )
                return


def _death(rank: _Rank) -> str:
    try:
        code: int | None = rank.process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    how = "ended" if code is None else f"ended with code {code}"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    return f"rank {rank.number} (pid {rank.process.pid}) {how}"


def _last_words(rank: _Rank) -> str | None:
    """What a rank sent before it ended, if it explained itself."""
    rank.ended.wait(_END_SECONDS)
    return rank.last_words


def _listen(ranks: Sequence[_Rank], life: _Life, told: Told) -> None:
    """Until the end: read what ranks say."""
    by_link = {rank.link: rank for rank in ranks}
    while by_link and not life.is_closing:
        try:
            ready = wait(list(by_link), _CHECK_SECONDS)
        except (OSError, ValueError):
            ready = list(by_link) if not life.is_closing else []
        for link in ready:
            rank = by_link[link]  # type: ignore[index]
            if not _hear(rank, told):
                del by_link[rank.link]
                rank.ended.set()
                rank.answers.put(None)


def _hear(rank: _Rank, told: Told) -> bool:
    """Read one message of a rank. False at the end of its link."""
    try:
        said = read_from_rank(rank.link.recv_bytes())
    except (EOFError, OSError):
        return False
    except msgspec.MsgspecError as fault:
        rank.last_words = f"rank {rank.number} does not speak this version's language: {fault}"
        return False
    match said:
        case Failed(text):
            rank.last_words = f"rank {rank.number} failed: {text}"
        case PagesMoved():
            told.moved.append((rank.number, said))
            told.ring()
        case FilesDone():
            told.files.append((rank.number, said))
            told.ring()
        case _:
            rank.answers.put(said)
    return True


def _end(
    ranks: Sequence[_Rank], life: _Life, directory: Path, owner: int, on_end: Callable[[], None]
) -> None:
    """End processes that this process started: by closing their links, then by force."""
    if os.getpid() != owner:
        return  # a fork has no ranks
    life.is_closing = True
    for rank in ranks:
        rank.link.close()
        rank.pulse.close()
    end = time.monotonic() + _END_SECONDS
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    shutil.rmtree(directory, ignore_errors=True)
    on_end()
