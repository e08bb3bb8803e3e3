"""The thread that drives an engine for asynchronous programs.

Any thread may post commands. Answers go to mailboxes, and each mailbox is read in the event loop of its
reader. All waiting commands are carried out between two steps. So requests of all tasks and event loops run
in one batch, and a cancelled request releases its pages before the next step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from kvant.engine.driver import IDLE_SECONDS, Driver, Event
from kvant.engine.result import EngineStats, Progress
from kvant.errors import EngineFault, KvantError, RequestError
from kvant.plan.device import chosen_gpu, work_on
from kvant.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvant.engine.engine import Engine

_log = logging.getLogger(__name__)


News = Progress | KvantError


class Mailbox:
    """A queue of one request's progress and errors. The worker fills it; one event loop reads it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.cancelled = False
        self._news: deque[News] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: News) -> None:
        """Adds progress or an error, and wakes the reader. Call only in the reader's event loop."""
        self._news.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Progress:
        """Returns the next piece, or raises the error that ended the request."""
        while not self._news:
            self._waiter = self.loop.create_future()
            await self._waiter
        news = self._news.popleft()
        if isinstance(news, Progress):
            return news
        raise news


Letters = list[tuple[Mailbox, News]]


def _put_all(letters: Letters) -> None:
    for mailbox, news in letters:
        mailbox.put(news)


def post(loop: asyncio.AbstractEventLoop, letters: Letters) -> bool:
    """Delivers letters to mailboxes of one event loop, from any thread. Returns False if it is closed.

    All letters go at once, because waking a loop is a system call.
    """
    try:
        loop.call_soon_threadsafe(_put_all, letters)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Submit:
    mailbox: Mailbox
    prompt: Sequence[int]
    params: SamplingParams
    salt: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request that has not ended; its mailbox gets the result so far."""

    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancels everything and ends the thread."""


Command = Submit | Cancel | Stop


class Worker:
    """Owns the engine from `start` on; nothing else may touch it. All methods are thread-safe."""

    stats: EngineStats

    def __init__(self) -> None:
        # A SimpleQueue may be put to from a finaliser in the middle of anything.
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._ending = threading.Lock()
        self._ended = False

    def start(self, make: Callable[[], Engine]) -> None:
        """Makes the engine in the new thread. Raises what `make` raises; the thread has ended then.

        The engine is made in the thread that steps it, because libraries keep state per thread. Torch's
        cuDNN attention plans are an example: each missing plan adds 27 ms to the step that needs it.
        """
        made: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, made, chosen_gpu()), name="kvant-engine", daemon=True
        )
        self._thread.start()
        try:
            made.result()
        except BaseException:
            self._commands.put(Stop())  # an interrupt does not wait until the engine is made
            raise

    def submit(self, submit: Submit) -> None:
        """Posts a request. Raises RequestError if the thread has ended or was told to end."""
        with self._ending:
            if self._ended:
                raise RequestError("this AsyncLLM is closed, or its engine has failed")
            self._commands.put(submit)

    def cancel(self, mailbox: Mailbox) -> None:
        """Posts a cancellation, even before the request is submitted; an ended request is unaffected."""
        mailbox.cancelled = True
        self._commands.put(Cancel(mailbox))

    def stop(self) -> None:
        """Cancels everything and returns when the thread has ended."""
        self._commands.put(Stop())
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # -- in the thread -------------------------------------------------------------------------

    def _run(self, make: Callable[[], Engine], made: Future[None], gpu: int | None) -> None:
        try:
            work_on(gpu)
            self._driver: Driver[Mailbox] = Driver(make())
            self.stats = self._driver.engine.stats
        except BaseException as fault:
            made.set_exception(fault)
            return
        made.set_result(None)
        try:
            while self._take_commands():
                self._deliver(self._driver.step())
                self.stats = self._driver.engine.stats
        except BaseException as fault:
            _log.exception("the engine's thread ends")
            self._give_up(fault)

    def _take_commands(self) -> bool:
        """Carries out waiting commands; waits for one if the engine is idle. Returns False to end."""
        while not self._driver.has_work or not self._commands.empty():
            try:
                command = self._commands.get(timeout=IDLE_SECONDS)
            except Empty:
                return True
            match command:
                case Submit() as submit:
                    self._submit(submit)
                case Cancel(mailbox):
                    self._cancel(mailbox)
                case Stop():
                    self._end()
                    return False
            self.stats = self._driver.engine.stats
        return True

    def _submit(self, submit: Submit) -> None:
        self._driver.submit(submit.mailbox, submit.prompt, submit.params, submit.salt)
        if submit.mailbox.cancelled:
            self._cancel(submit.mailbox)

    def _cancel(self, mailbox: Mailbox) -> None:
        result = self._driver.cancel(mailbox)
        if result is not None:
            post(mailbox.loop, [(mailbox, Progress(result.number, (), "", result))])

    def _end(self) -> None:
        with self._ending:
            self._ended = True
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submit):
                command.mailbox.cancelled = True
                self._submit(command)
        for key in self._driver.keys:
            self._cancel(key)
        self._deliver(self._driver.take_ended())
        self.stats = self._driver.engine.stats

    def _give_up(self, fault: BaseException) -> None:
        """Ends every request with an EngineFault, because the engine cannot go on."""
        with self._ending:
            self._ended = True
        self._deliver(self._driver.take_ended())
        waiting = self._driver.keys
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submit):
                waiting.append(command.mailbox)
        for mailbox in waiting:
            post(mailbox.loop, [(mailbox, EngineFault(f"the engine has ended: {fault}"))])

    def _deliver(self, events: list[Event[Mailbox]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, Letters] = {}
        for job, news in events:
            mailbox = job.key
            by_loop.setdefault(mailbox.loop, []).append((mailbox, news))
        for loop, letters in by_loop.items():
            if not post(loop, letters):  # closed: nothing reads these answers any more
                for mailbox, _ in letters:
                    self._driver.cancel(mailbox)
