"""The one thread that steps an engine for asynchronous programs.

Whoever wants something posts a command; answers go to mailboxes, each read in the event loop of its
reader. Between two steps all commands that have come are carried out, so that requests of any number
of tasks and loops run in one batch, and a cancelled one has its pages back before the next step.
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

from kvant.engine.failed_steps import FailedSteps
from kvant.engine.idle_audits import AFTER_SECONDS, IdleAudits
from kvant.engine.result import EngineStats, Progress
from kvant.errors import EngineFault, KvantError, RequestError
from kvant.plan.device import chosen_gpu, work_on
from kvant.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvant.engine.engine import Engine

_log = logging.getLogger(__name__)


News = Progress | KvantError


class Mailbox:
    """What one request has to say. Filled by the worker, read in one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.cancelled = False
        self._news: deque[News] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: News) -> None:
        """In the reader's loop only."""
        self._news.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Progress:
        """The next piece; raises what went wrong instead."""
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
    """To mailboxes of one loop, from any thread. False if it is closed: nobody listens any more.

    All at once: to wake a loop is a system call.
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
    """End a request if it has not ended; its mailbox gets the result so far."""

    mailbox: Mailbox


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel everything and end the thread."""


Command = Submit | Cancel | Stop


class Worker:
    """Owns the engine from `start` on: nobody else may touch it. Its methods may be called from anywhere."""

    stats: EngineStats

    def __init__(self) -> None:
        # A SimpleQueue may be put to from a finaliser in the middle of anything.
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._ending = threading.Lock()
        self._ended = False
        self._mailboxes: dict[int, Mailbox] = {}  # by the engine's number
        self._numbers: dict[Mailbox, int] = {}

    def start(self, make: Callable[[], Engine]) -> None:
        """Have the thread make its engine; raises what `make` raises, and the thread has ended then.

        In the thread that steps, since what a library prepares may be a thread's own: torch keeps cuDNN's
        plans of attention so, and each that is missing takes 27 ms of the step that needs it.
        """
        made: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make, made, chosen_gpu()), name="kvant-engine", daemon=True
        )
        self._thread.start()
        try:
            made.result()
        except BaseException:
            self._commands.put(Stop())  # whoever interrupts does not wait for the engine to be made
            raise

    def submit(self, submit: Submit) -> None:
        """RequestError if the thread has ended, or been told to."""
        with self._ending:
            if self._ended:
                raise RequestError("this AsyncLLM is closed, or its engine has failed")
            self._commands.put(submit)

    def cancel(self, mailbox: Mailbox) -> None:
        """Also before its request is submitted; does nothing to one that has ended."""
        mailbox.cancelled = True
        self._commands.put(Cancel(mailbox))

    def stop(self) -> None:
        """Cancel everything, and return when the thread has ended."""
        self._commands.put(Stop())
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # -- in the thread -------------------------------------------------------------------------

    def _run(self, make: Callable[[], Engine], made: Future[None], gpu: int | None) -> None:
        try:
            work_on(gpu)
            self._engine = make()
            self._audits = IdleAudits(self._engine)
            self._failed = FailedSteps(self._engine)
            self.stats = self._engine.stats
        except BaseException as fault:
            made.set_exception(fault)
            return
        made.set_result(None)
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._audits.worked()
                    try:
                        self._deliver(self._engine.step())
                        self._failed.in_a_row = 0
                    except Exception:
                        self._failed.survive(self._mailboxes, self._tell_failed)
                else:
                    self._audits.rest()
                self.stats = self._engine.stats
        except BaseException as fault:
            _log.exception("the engine's thread ends")
            self._give_up(fault)

    def _take_commands(self) -> bool:
        """Carry out what has come, waiting a while for it if there is nothing to do. False: to end."""
        while not self._engine.has_work or not self._commands.empty():
            try:
                command = self._commands.get(timeout=AFTER_SECONDS)
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
            self.stats = self._engine.stats
        return True

    def _end(self) -> None:
        with self._ending:
            self._ended = True
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submit):
                command.mailbox.cancelled = True
                self._submit(command)
        for mailbox in list(self._numbers):
            self._cancel(mailbox)
        self.stats = self._engine.stats

    def _give_up(self, fault: BaseException) -> None:
        """The engine is not sound any more: nobody is left to wait for it."""
        with self._ending:
            self._ended = True
        waiting = list(self._mailboxes.values())
        while not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, Submit):
                waiting.append(command.mailbox)
        for mailbox in waiting:
            post(mailbox.loop, [(mailbox, EngineFault(f"the engine has ended: {fault}"))])
        self._mailboxes.clear()
        self._numbers.clear()

    def _submit(self, submit: Submit) -> None:
        try:
            number = self._engine.submit(submit.prompt, submit.params, salt=submit.salt)
        except RequestError as fault:
            self._tell(submit.mailbox, fault)
        except Exception as fault:
            _log.exception("a request could not be submitted")
            self._tell(submit.mailbox, _ours(fault))
        else:
            self._mailboxes[number] = submit.mailbox
            self._numbers[submit.mailbox] = number
            if submit.mailbox.cancelled:
                self._cancel(submit.mailbox)

    def _cancel(self, mailbox: Mailbox) -> None:
        number = self._numbers.pop(mailbox, None)
        if number is None:
            return
        del self._mailboxes[number]
        result = self._engine.cancel(number)
        if result is not None:
            self._tell(mailbox, Progress(number, (), "", result))

    def _deliver(self, pieces: list[Progress]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, Letters] = {}
        for piece in pieces:
            mailbox = self._mailboxes.get(piece.number)
            if mailbox is None:
                continue
            news: News = piece
            if piece.result is not None:
                self._forget(piece.number)
                news = piece.result.error or piece
            by_loop.setdefault(mailbox.loop, []).append((mailbox, news))
        for loop, letters in by_loop.items():
            self._tell_all(loop, letters)

    def _tell_failed(self, number: int) -> None:
        self._tell(self._forget(number), EngineFault("the step that ran this request failed"))

    def _forget(self, number: int) -> Mailbox:
        mailbox = self._mailboxes.pop(number)
        del self._numbers[mailbox]
        return mailbox

    def _tell(self, mailbox: Mailbox, news: News) -> None:
        self._tell_all(mailbox.loop, [(mailbox, news)])

    def _tell_all(self, loop: asyncio.AbstractEventLoop, letters: Letters) -> None:
        if post(loop, letters):
            return
        for mailbox, _ in letters:
            number = self._numbers.get(mailbox)
            if number is not None:
                self._engine.cancel(number)
                self._forget(number)


def _ours(fault: Exception) -> EngineFault:
    return EngineFault(f"the engine failed on this request: {fault!r}")
