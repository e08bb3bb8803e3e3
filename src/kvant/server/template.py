"""The tokenizer in the API process, and chat templates in a process of their own; neither imports torch.

A template is a program of the checkpoint. transformers' sandbox protects the system from it. The process,
`python -P -m kvant.server.template SECONDS`, limits its time and memory. Messages on standard input and
output are frames: four bytes of length, then msgpack. The process ends when its standard input closes or a
template takes longer than SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvant.engine import text as engine_text
from kvant.errors import RequestError
from kvant.models.directory import has_tokenizer
from kvant.server.api_error import unavailable

_MEMORY = 640 * 2**20
"""Bytes that the process may allocate for rendering: room for the largest body, written out."""

OUTPUT_FACTOR, OUTPUT_BASE = 8, 2**20
"""A rendered conversation has at most FACTOR times its characters, plus BASE."""


class Render(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation to render. variables: further variables of the template, such as special tokens."""

    template: str
    messages: tuple[dict[str, Any], ...]
    variables: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: tuple[dict[str, Any], ...] | None = None


class Rendered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rendered conversation. fault: why text is None."""

    text: str | None
    fault: str | None = None


_requests = msgspec.msgpack.Decoder(Render)
_answers = msgspec.msgpack.Decoder(Rendered)


_START_SECONDS = 60.0
_GRACE_SECONDS = 0.5


class Renderer:
    """A process that renders one conversation after the other, and is restarted when it dies.

    seconds: the time limit for one conversation.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._turn = asyncio.Lock()
        self._exchanges: set[asyncio.Task[str]] = set()

    def start(self) -> None:
        """Starts the process in the background, which takes a second."""
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
        # The exchange runs to its end even if the client leaves: else the next one would read its answer.
        return await asyncio.shield(exchange)

    def _done(self, exchange: asyncio.Task[str]) -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # marks it as seen

    async def _exchange(self, data: bytes) -> str:
        async with self._turn:
            # Ask twice: if the process was killed while it was idle, the new process answers.
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
        """Returns the process's answer, or None if the process ended. Raises RequestError if the template
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
        command = ("-P", "-m", "kvant.server.template", str(self._seconds))
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


# -- in the process ---------------------------------------------------------------------------


def main(seconds: float) -> int:
    sys.modules["torch"] = None  # type: ignore[assignment] # transformers would import it
    from transformers.utils.chat_template_utils import render_jinja_template

    most = _virtual_memory() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    send(sink, b"")  # ready
    while (data := receive(source)) is not None:
        # The signal has no handler, so it ends the process at any point.
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = msgspec.msgpack.encode(_render(_requests.decode(data), render_jinja_template))
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(sink, answer)
    return 0


def _render(request: Render, render: Any) -> Rendered:
    try:
        (text,), _ = render(
            conversations=[list(request.messages)],
            tools=None if request.tools is None else list(request.tools),
            chat_template=request.template,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.variables,
        )
    except MemoryError:
        return Rendered(None, "it needs too much memory")
    except Exception as fault:  # the template is a program and may raise anything
        return Rendered(None, str(fault)[:500] or type(fault).__name__)
    most = OUTPUT_FACTOR * len(str([*request.messages])) + OUTPUT_BASE
    if len(text) > most:
        return Rendered(None, f"it wrote {len(text)} characters, more than {most}")
    return Rendered(text)


def send(sink: BinaryIO, data: bytes) -> None:
    sink.write(len(data).to_bytes(4, "big") + data)
    sink.flush()


def receive(source: BinaryIO) -> bytes | None:
    """Returns the next frame, or None at the end of the stream."""
    head = source.read(4)
    return source.read(int.from_bytes(head, "big")) if len(head) == 4 else None


def _virtual_memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


# -- the tokenizer ----------------------------------------------------------------------------


def open_tokenizer(path: Path) -> engine_text.Tokenizing | None:
    """Opens a tokenizer like `kvant.engine.text.open_tokenizer`, without importing torch.

    transformers imports torch if it finds it, though tokenizers do not need it. So torch is hidden while
    transformers is imported here.
    """
    if not has_tokenizer(path):
        return None
    _import_transformers()
    return engine_text.open_tokenizer(path)


def _import_transformers() -> None:
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    # The tokenizers library's threads would not survive the fork that starts the next engine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import transformers  # noqa: F401
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
