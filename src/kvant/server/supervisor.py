"""Supervises the engine process: starts it, exchanges messages with it, and restarts it when it dies.

STARTING -> READY -> RESTARTING -> READY ...      until `stop`, or until it gives up
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvant.errors import KvantError
from kvant.plan.settings import Settings
from kvant.sampling.sampling_params import SamplingParams
from kvant.server.config import Restarts
from kvant.server.messages import (
    Cancel,
    Failure,
    Fault,
    Loading,
    Piece,
    Ready,
    Report,
    Stats,
    Submit,
    ToEngine,
    encode,
    read_from_engine,
)
from kvant.server.socket_directory import SocketDirectory

GAVE_UP = 70
"""Exit code if the engine died too often: EX_SOFTWARE of sysexits.h, so that a service manager restarts."""

_CHECK_SECONDS = 0.2
_log = logging.getLogger(__name__)


Event = Piece | Failure


class Channel:
    """A queue of events of one request's sequences, read by the task that answers the request.

    It is bounded: `overflowed` is set once more than `most_bytes` wait. After that only failures are kept.
    The reader must close it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._events: list[Event] = []
        self._came = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._most_bytes = most_bytes
        self._waiting = 0
        self.overflowed = False

    def put(self, event: Event) -> None:
        size = _size(event)
        self.overflowed |= self._waiting + size > self._most_bytes
        if not self.overflowed or isinstance(event, Failure):
            self._waiting += size
            self._events.append(event)
        self._came.set()

    def take(self) -> list[Event]:
        """Removes and returns all waiting events, maybe none."""
        events, self._events = self._events, []
        self._waiting = 0
        self._came.clear()
        return events

    async def wait(self, until: float) -> None:
        """Waits for an event, at most until `until` on `time.monotonic`'s clock; may return earlier.

        One timer serves many waits, whose ends only move later. A timer for each token would cost a quarter
        of the time of a token.
        """
        if self._alarm is None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(until, self._ring)
        await self._came.wait()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _ring(self) -> None:
        self._alarm = None
        self._came.set()


_PIECE_BYTES = 64
_CHAR_BYTES = 4
_LOGPROB_BYTES = 100


def _size(event: Event) -> int:
    """Returns the approximate bytes of a waiting event."""
    if not isinstance(event, Piece):
        return 0
    size = _PIECE_BYTES + _CHAR_BYTES * len(event.text)
    if event.logprobs:
        # Excludes the prompt's log-probabilities: they come once and have their own limit.
        size += _LOGPROB_BYTES * sum(1 + len(one.top) for one in event.logprobs)
    return size


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class StartFault(KvantError):
    """Raised if the engine could not start. The message is for the user."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervisor:
    """Owns the engine's process. All methods must be called in one event loop.

    on_ready: called each time an engine is ready. on_loading: called with the progress of a start.
    on_report: called with the previous report and each new one; a restarted engine counts from 0.
    """

    def __init__(
        self,
        settings: Settings,
        restarts: Restarts,
        *,
        on_ready: Callable[[Ready], None],
        on_loading: Callable[[Loading], None],
        on_report: Callable[[Report, Report], None],
    ) -> None:
        self.state = State.STARTING
        self.ready: Ready | None = None
        self.loading: Loading | None = None
        self._report = Report(Stats())
        self.num_deaths = 0
        self._settings = settings
        self._restarts = restarts
        self._on_ready, self._on_loading, self._on_report = on_ready, on_loading, on_report
        self._ids = itertools.count(1)
        self._channels: dict[int, Channel] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._fault: Fault | None = None
        self._silent = 0.0
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The engine's process id, or None if it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def stats(self) -> Stats:
        """The engine's last reported numbers."""
        return self._report.stats

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY

    # -- requests ------------------------------------------------------------------------------

    def submit(
        self, work: Iterable[tuple[tuple[int, ...], SamplingParams]], salt: str, channel: Channel
    ) -> list[int]:
        """Sends sequences to the engine. Returns their ids. `channel` gets all their events."""
        ids = []
        for prompt, sampling in work:
            id = next(self._ids)
            self._channels[id] = channel
            ids.append(id)
            self._send(Submit(id, prompt, sampling, salt))
        return ids

    def cancel(self, ids: Iterable[int]) -> None:
        """Cancels sequences, which send no more events. Ended sequences are ignored."""
        open_ids = tuple(id for id in ids if self._channels.pop(id, None) is not None)
        if open_ids:
            self._send(Cancel(open_ids))

    def _send(self, message: ToEngine) -> None:
        if self._socket is not None and self.state is State.READY:
            # Without a high-water mark, sending never blocks or drops: the socket queues messages in order.
            self._socket.send(encode(message))

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Keeps an engine running until `stop` or until it gives up. Returns the process's exit code.

        Raises StartFault if the first engine does not start.
        """
        deaths: deque[float] = deque()
        directory = SocketDirectory()
        try:
            for incarnation in itertools.count():
                served = await self._live(directory.path / f"engine-{incarnation}")
                if self._stopping.is_set():
                    return 0
                if self.ready is None:
                    fault = self._fault or Fault("the engine ended while it was starting", 1)
                    raise StartFault(fault.message, fault.exit_code)
                now = time.monotonic()
                deaths.append(now)
                while deaths and now - deaths[0] > self._restarts.window_seconds:
                    deaths.popleft()
                if self._fault is not None and not served:
                    _log.error("the engine could not start again: %s", self._fault.message)
                if not self._restarts.allowed or len(deaths) > self._restarts.most:
                    _log.error("giving up: the engine died %d times", len(deaths))
                    return GAVE_UP
                self.state = State.RESTARTING
                pause = self._restarts.first_pause_seconds * 2 ** (len(deaths) - 1)
                _log.warning("the engine died; starting it again in %g s", pause)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
                    return 0
            raise AssertionError("unreachable")
        finally:
            self.state = State.STOPPED
            self._fail_all()
            directory.remove()

    async def stop(self) -> None:
        """Kills the engine; `run` then returns 0."""
        self._stopping.set()
        self._kill()

    async def _live(self, path: Path) -> bool:
        """Runs one engine from start to end. Returns whether it was ready when it ended."""
        self._fault = None
        context = zmq.asyncio.Context.instance()
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(f"ipc://{path}")
        self._socket = socket
        command = ("-P", "-m", "kvant.server.engine_process", f"ipc://{path}")
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._process = process
        if self._stopping.is_set():  # `stop` was called during the start
            self._kill()
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        reader = asyncio.create_task(self._read(socket))
        watcher = asyncio.create_task(self._watch())
        try:
            await process.wait()
            served = self.state is State.READY
            if not served:
                # Its last messages may still be in transit.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(reader), 0.5)
            return served
        finally:
            if self.state is State.READY:
                self.state = State.RESTARTING
                self.num_deaths += not self._stopping.is_set()
            self._fail_all()
            self._process = None
            for task in (reader, watcher):
                task.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.gather(reader, watcher, return_exceptions=True)
            socket.close()
            self._socket = None
            process.stdin.close()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        """Reads messages until the engine reports a fault. An invalid message kills the engine only."""
        try:
            await self._take_messages(socket)
        except Exception:
            _log.exception("what the engine said could not be taken")
            self._kill()

    async def _take_messages(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = read_from_engine(await socket.recv())
            self._silent = 0.0
            match message:
                case Loading():
                    self.loading = message
                    self._on_loading(message)
                case Ready():
                    self.ready = message
                    self.loading = None
                    self.state = State.READY
                    self._on_ready(message)
                case Fault():
                    self._fault = message
                    return
                case Report():
                    before, self._report = self._report, message
                    self._on_report(before, message)
                    for piece in message.pieces:
                        ended = piece.finish_reason is not None
                        self._route(piece.id, piece, ended=ended)
                    for failure in message.failures:
                        self._route(failure.id, failure, ended=True)

    def _route(self, id: int, event: Event, *, ended: bool) -> None:
        channel = self._channels.pop(id, None) if ended else self._channels.get(id)
        if channel is not None:  # else the sequence was cancelled before
            channel.put(event)
            if channel.overflowed and not ended:
                self.cancel((id,))  # its client reads too slowly

    async def _watch(self) -> None:
        """Kills an engine that has stopped reporting.

        Counts only the time in which this process could receive reports. A long gap between two checks means
        that this process was paused or busy, not that the engine hangs.
        """
        last = time.monotonic()
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            now = time.monotonic()
            self._silent += min(now - last, 2 * _CHECK_SECONDS)
            last = now
            if self.state is State.READY and self._silent > self._restarts.engine_timeout:
                _log.error("the engine has not reported for %.1f s and is ended", self._silent)
                self._kill()
                return

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _fail_all(self) -> None:
        channels, self._channels = self._channels, {}
        self._report = Report(Stats(num_usable_pages=self.stats.num_usable_pages))
        for id, channel in channels.items():
            channel.put(_cut(id) if self._stopping.is_set() else _died(id))


def _died(id: int) -> Failure:
    return Failure(id, "engine_died", "the engine died while it served this request")


def _cut(id: int) -> Failure:
    return Failure(id, "shutting_down", "this server was shut down before the answer was complete")
