"""Renders chat templates within limits, in the process of `kvant.server.template_process`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import msgspec

from kvant.errors import RequestError
from kvant.server.api_error import unavailable
from kvant.server.template_process import Render, Rendered

_START_SECONDS = 60.0
_GRACE_SECONDS = 0.5
_answers = msgspec.msgpack.Decoder(Rendered)


class Renderer:
    """One process that renders one conversation after the other; it is restarted when it dies.

    seconds: the limit for one conversation.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._turn = asyncio.Lock()
        self._exchanges: set[asyncio.Task[str]] = set()

    def start(self) -> None:
        """Begins to start the process, which takes a second."""
        self._starting = asyncio.create_task(self._start())

    async def stop(self) -> None:
        for task in (*self._exchanges, *filter(None, (self._starting,))):
            task.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        if self._starting is not None:
            with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError, EOFError):
                self._process = await self._starting
        await self._end()

    async def render(self, request: Render) -> str:
        """Returns the conversation as text. Raises RequestError if the template refuses it or exceeds its
        limits, ApiError 503 if the process cannot be started.
        """
        exchange = asyncio.create_task(self._exchange(msgspec.msgpack.encode(request)))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._done)
        # A client may leave, but an exchange always ends: the next one would read its answer.
        return await asyncio.shield(exchange)

    def _done(self, exchange: asyncio.Task[str]) -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # marks it as seen

    async def _exchange(self, data: bytes) -> str:
        async with self._turn:
            # A process that was killed while it was idle is noticed here: its successor answers.
            answer = await self._ask(data) or await self._ask(data)
            if answer is None:
                raise RequestError(
                    "the process that renders the chat template ended, perhaps for lack of memory",
                    param="messages",
                )
        if answer.text is None:
            raise RequestError(
                f"the chat template refuses this conversation: {answer.fault}", param="messages"
            )
        return answer.text

    async def _ask(self, data: bytes) -> Rendered | None:
        """Returns the process's answer, or None if the process ended. Raises RequestError for one that
        takes too long.
        """
        process = await self._ready()
        assert process.stdin is not None
        assert process.stdout is not None
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds + _GRACE_SECONDS):
                process.stdin.write(len(data).to_bytes(4, "big") + data)
                await process.stdin.drain()
                return _answers.decode(await _frame(process.stdout))
        except (TimeoutError, EOFError, OSError):
            await self._end()
            self.start()
            if time.monotonic() - started < self._seconds:
                return None
            raise RequestError(
                f"the chat template took longer than {self._seconds:g} s", param="messages"
            ) from None
        except BaseException:
            await self._end()
            raise

    async def _ready(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            if self._starting is None:
                self.start()
            assert self._starting is not None
            try:
                self._process = await self._starting
            except (TimeoutError, EOFError, OSError):
                raise unavailable(
                    "the process that renders chat templates could not be started",
                    code="template_process",
                ) from None
            finally:
                self._starting = None
        return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        command = ("-P", "-m", "kvant.server.template_process", str(self._seconds))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(_START_SECONDS):
                await _frame(process.stdout)
        except BaseException:
            await _killed(process)
            raise
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _killed(process)


async def _killed(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _frame(source: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await source.readexactly(4), "big")
    return await source.readexactly(size)
