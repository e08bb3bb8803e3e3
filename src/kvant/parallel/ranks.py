"""Rank 0's view of the other ranks' processes: starts them, sends to them, detects when one is lost."""

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
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec

from kvant.errors import RankLost
from kvant.parallel.messages import (
    Answer,
    Failed,
    FilesDone,
    Loaded,
    PagesMoved,
    PeerRead,
    Start,
    ToRank,
    encode,
    encode_to_rank,
    read_from_rank,
)
from kvant.parallel.ring import LinkSender, Payload, Ring

SILENT_SECONDS = 7.0
"""A rank whose pulse is silent for this long counts as hanging. It beats every second.

Ending the ranks takes up to two seconds more, and clients are told within ten."""

SILENT_AT_START_SECONDS = 60.0
"""The same before the first step: imports and compilers may hold the lock, and no request waits."""

_CHECK_SECONDS = 0.5
_END_SECONDS = 2.0
_log = logging.getLogger(__name__)


class Process(Protocol):
    """The methods of `subprocess.Popen` that ranks need."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        ...


class Joined(Process, Protocol):
    """A rank that another launcher started, with its two connections."""

    @property
    def number(self) -> int: ...

    @property
    def link(self) -> Connection[bytes, bytes]: ...

    @property
    def pulse(self) -> socket.socket: ...


@dataclass(eq=False)
class _Rank:
    """One other rank, whose `link` a thread reads. silence: seconds since its last pulse, see `_watch`.

    answers: messages that were read, then None when the link has ended. ended: set at that moment.
    last_words: why the rank ends, if it sent a reason.
    """

    number: int
    process: Process
    link: Connection[bytes, bytes]
    pulse: socket.socket
    silence: float = 0.0
    answers: SimpleQueue[Answer | None] = field(default_factory=SimpleQueue)
    ended: threading.Event = field(default_factory=threading.Event)
    last_words: str | None = None


@dataclass(eq=False)
class Inbox:
    """Messages about pages that ranks send by themselves, with the rank's number. ring: called after each.

    peers: by the number of the other engine.
    """

    moved: deque[tuple[int, PagesMoved]] = field(default_factory=deque)
    files: deque[tuple[int, FilesDone]] = field(default_factory=deque)
    peers: dict[int, deque[tuple[int, PeerRead]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    ring: Callable[[], None] = lambda: None


class Ranks:
    """Ranks 1 .. size - 1, each in a process of its own, watched by a thread. Methods are not thread-safe.

    on_loss: called once when a rank was lost, maybe by the watching thread, after all ranks were killed.
    on_end: called after all ranks have ended with the engine.
    """

    def __init__(
        self,
        on_loss: Callable[[str], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvant-ranks-"))
        self._ranks: list[_Rank] = []
        self._links: list[Connection[bytes, bytes]] = []
        self._ring: Ring | LinkSender
        self.inbox = Inbox()
        self._life = _Life(on_loss, self.directory)
        self._finalizer = weakref.finalize(
            self, _end, self._ranks, self._life, self.directory, os.getpid(), on_end
        )

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def start(self, starts: Sequence[Start], joined: Sequence[Joined] = ()) -> None:
        """Starts one process per entry of `starts`. The processes begin to load their weights.

        joined: ranks that another launcher started, in the order of `starts`; used instead of new processes.
        """
        if joined:
            for one, start in zip(joined, starts, strict=True):
                rank = _Rank(one.number, one, one.link, one.pulse)
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
        self._links = [rank.link for rank in self._ranks]
        for name, work in (
            ("kvant-ranks", partial(_watch, self._ranks, self._life)),
            ("kvant-ranks-listen", partial(_listen, self._ranks, self._life, self.inbox)),
        ):
            threading.Thread(target=work, name=name, daemon=True).start()

    def wait_loaded(self) -> None:
        """Waits until the weights of all ranks are on their devices. Raises RankLost."""
        for answer in self.answers():
            assert isinstance(answer, Loaded)

    def send(self, message: ToRank) -> None:
        """Sends a message to every rank. Raises RankLost."""
        self._send(encode_to_rank(message))

    def send_array(self, numbers: Payload) -> None:
        """Sends numbers made by `kvant.parallel.mirror` to every rank. Raises RankLost."""
        self._life.has_steps = True
        self._send(numbers)

    def _send(self, payload: Payload) -> None:
        self.check()
        broken = self._ring.send(payload, self._links)
        if broken is not None:
            raise self._lost(self._ranks[broken])

    def answers(self) -> list[Answer]:
        """Returns one answer from every rank, in the order of ranks. Raises RankLost."""
        found = []
        for rank in self._ranks:
            answer = rank.answers.get()
            if answer is None:
                raise self._lost(rank)
            found.append(answer)
        return found

    def check(self) -> None:
        """Raises RankLost if a rank was lost."""
        self._life.check()

    def explain(self, fault: BaseException) -> None:
        """Raises RankLost if a rank was lost, or is found lost soon after a collective raised `fault`."""
        end = time.monotonic() + _END_SECONDS
        while self._life.fault is None and time.monotonic() < end:
            time.sleep(0.02)
        if self._life.fault is not None:
            raise RankLost(self._life.fault) from fault

    def close(self) -> None:
        """Ends all ranks and waits for their processes."""
        self._finalizer()

    def _lost(self, rank: _Rank) -> RankLost:
        said = _last_words(rank)
        self._life.lose(self._ranks, said or f"rank {rank.number} (pid {rank.process.pid}) ended")
        assert self._life.fault is not None
        return RankLost(self._life.fault)


class _Life:
    """The ranks' common state, shared with the watching thread.

    fault: why a rank was lost, or None. has_steps: whether the start is over. directory: where ranks meet.
    """

    def __init__(self, on_loss: Callable[[str], None], directory: Path) -> None:
        self.fault: str | None = None
        self.is_closing = self.has_steps = False
        self._on_loss, self._directory = on_loss, directory
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raises RankLost if a rank was lost."""
        if self.fault is not None:
            raise RankLost(self.fault)

    def lose(self, ranks: Sequence[_Rank], fault: str) -> None:
        """Stores the first fault and kills all ranks, since none can go on without the others."""
        with self._lock:
            if self.fault is not None or self.is_closing:
                return
            self.fault = fault
        _log.error("%s; the engine cannot go on", fault)
        for rank in ranks:
            rank.process.kill()
        shutil.rmtree(
            self._directory, ignore_errors=True
        )  # this process may end without its finalizers
        self._on_loss(fault)


def spawn(link: socket.socket, pulse: socket.socket, *more: int) -> Process:
    """Starts a rank's process with its ends of the two sockets. more: arguments of `rank_process`."""
    fds = link.fileno(), pulse.fileno()
    command = [sys.executable, "-P", "-m", "kvant.parallel.rank_process", *map(str, fds + more)]
    # In a session of its own, so that an interrupt at the terminal reaches rank 0 only.
    return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)


def _start(number: int) -> _Rank:
    link, its_link = socket.socketpair()
    pulse, its_pulse = socket.socketpair()
    process = spawn(its_link, its_pulse)
    its_link.close()
    its_pulse.close()
    return _Rank(number, process, Connection(link.detach()), pulse)


def _watch(ranks: Sequence[_Rank], life: _Life) -> None:
    """Listens to every rank's pulse until the engine ends. A rank may be silent before its first pulse.

    Time in which this thread got no core does not count as silence: the ranks may have got none either.
    """
    silent = {rank.number for rank in ranks}
    last = time.monotonic()
    while life.fault is None and not life.is_closing:
        by_pulse = {rank.pulse: rank for rank in ranks}
        try:
            ready = wait(list(by_pulse), _CHECK_SECONDS)
        except OSError:
            return  # closed by the end
        passed, last = time.monotonic() - last, time.monotonic()
        for rank in ranks:
            rank.silence += min(passed, 2 * _CHECK_SECONDS)
        for pulse in ready:
            rank = by_pulse[pulse]  # type: ignore[index]
            try:
                alive = bool(rank.pulse.recv(4096))
            except OSError:
                alive = False
            rank.silence = 0.0
            silent.discard(rank.number)
            if not alive and not life.is_closing:
                life.lose(ranks, _last_words(rank) or _death(rank))
                return
        most = SILENT_SECONDS if life.has_steps else SILENT_AT_START_SECONDS
        for rank in ranks:
            if rank.number not in silent and rank.silence > most:
                life.lose(
                    ranks,
                    f"rank {rank.number} (pid {rank.process.pid}) hangs: "
                    f"silent for {rank.silence:.0f} s",
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
    """Returns the reason that a rank sent before it ended, or None. Waits for the end of its link."""
    rank.ended.wait(_END_SECONDS)
    return rank.last_words


def _listen(ranks: Sequence[_Rank], life: _Life, inbox: Inbox) -> None:
    """Reads the messages of all ranks until the engine ends."""
    by_link = {rank.link: rank for rank in ranks}
    while by_link and not life.is_closing:
        try:
            ready = wait(list(by_link), _CHECK_SECONDS)
        except (OSError, ValueError):
            ready = list(by_link) if not life.is_closing else []
        for link in ready:
            rank = by_link[link]  # type: ignore[index]
            if not _hear(rank, inbox):
                del by_link[rank.link]
                rank.ended.set()
                rank.answers.put(None)


def _hear(rank: _Rank, inbox: Inbox) -> bool:
    """Reads one message of a rank. Returns False at the end of its link."""
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
            inbox.moved.append((rank.number, said))
            inbox.ring()
        case FilesDone():
            inbox.files.append((rank.number, said))
            inbox.ring()
        case PeerRead():
            inbox.peers[said.number].append((rank.number, said))
            inbox.ring()
        case _:
            rank.answers.put(said)
    return True


def _end(
    ranks: Sequence[_Rank], life: _Life, directory: Path, owner: int, on_end: Callable[[], None]
) -> None:
    """Ends the ranks' processes by closing their links and, after _END_SECONDS, by killing them."""
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
