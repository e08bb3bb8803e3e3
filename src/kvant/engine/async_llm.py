"""`AsyncLLM`: the engine for asynchronous Python programs."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from kvant.engine.llm import LLM, Prompt
from kvant.engine.result import Progress, as_metrics
from kvant.engine.text import Message
from kvant.engine.worker import Mailbox, Submit, Worker, post
from kvant.errors import EngineFault, KvantError
from kvant.kv.spec import KVPlan
from kvant.models import local
from kvant.plan.config import EngineConfig, LLMOptions
from kvant.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvant.engine.engine import Engine


class AsyncStream(AsyncIterator[Progress]):
    """Yields what each step adds to one request; the last piece carries the result.

    Only one task may read it, and the request's errors are raised there. Cancelling that task, leaving the
    loop early or dropping the stream cancels the request. A variable, or a kept traceback, can keep a
    stream alive: use `async with` to end it at a definite place.
    """

    def __init__(self, llm: AsyncLLM, worker: Worker, mailbox: Mailbox) -> None:
        self._llm = llm  # must outlive its streams
        self._worker = worker
        self._mailbox = mailbox
        self._ended = False
        self._reader: asyncio.Task[object] | None = None

    async def __anext__(self) -> Progress:
        if self._ended:
            raise StopAsyncIteration
        self._watch(asyncio.current_task())
        try:
            piece = await self._mailbox.get()
        except BaseException:
            self._close()
            raise
        self._ended = piece.result is not None
        return piece

    def cancel(self) -> None:
        """Ends the request as soon as the running step allows; the last piece then says `cancelled`."""
        self._worker.cancel(self._mailbox)

    async def aclose(self) -> None:
        """Cancels the request if it has not ended; nothing more is yielded."""
        self._close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._ended:
            self._ended = True
            self.cancel()

    def _watch(self, task: asyncio.Task[object] | None) -> None:
        """Cancels the request if the task that reads it is cancelled while it awaits something else."""
        if task is None or task is self._reader:
            return
        self._reader = task
        task.add_done_callback(_Watcher(self._worker, self._mailbox))


class _Watcher:
    """A task's done-callback that cancels the request. It holds no stream, so the task keeps none alive."""

    def __init__(self, worker: Worker, mailbox: Mailbox) -> None:
        self._worker, self._mailbox = worker, mailbox

    def __call__(self, task: asyncio.Task[object]) -> None:
        if task.cancelled():
            self._worker.cancel(self._mailbox)


class AsyncLLM:
    """A model that answers many tasks at once.

        llm = AsyncLLM("smollm2", kv_cache_dtype="fp8_per_token_head")
        async for piece in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(piece.text, end="")
        llm.close()

    Arguments are those of `LLM`. Concurrent requests run in one batch, stepped by one thread. That thread
    also loads the model and calls `progress`, while the constructor waits. Methods can be called from any
    event loop of any thread. A step that fails raises EngineFault for its requests. Several failed steps
    in a row end the engine (`kvant.engine.driver`), and every reader gets the error.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        progress: local.Progress | None = None,
        **options: Unpack[LLMOptions],
    ) -> None:
        self._start(lambda: LLM(model, progress=progress, **options))

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, progress: local.Progress | None = None
    ) -> AsyncLLM:
        """Builds an AsyncLLM from a configuration, for example one read from command line flags."""
        made = cls.__new__(cls)
        made._start(lambda: LLM.from_config(config, progress=progress))
        return made

    @classmethod
    def from_llm(cls, llm: LLM) -> AsyncLLM:
        """Takes over a loaded model; the LLM itself must not generate any more.

        On a GPU the first long prompts are slower: cuDNN's attention plans of the loading thread are not
        shared, so the new thread makes them again.
        """
        made = cls.__new__(cls)
        made._start(lambda: llm)
        return made

    def _start(self, load: Callable[[], LLM]) -> None:
        loaded: list[LLM] = []

        def make() -> Engine:  # holds no AsyncLLM, which would keep it alive
            loaded.append(load())
            return loaded[0].engine

        self._worker = Worker()
        self._worker.start(make)
        self._llm = loaded.pop()
        # Also at exit: the thread must not be in a step when Python shuts down.
        self._stop = weakref.finalize(self, self._worker.stop)

    @property
    def plan(self) -> KVPlan:
        """What every layer stores, and who decided it."""
        return self._llm.plan

    @property
    def default_params(self) -> SamplingParams:
        """Parameters of requests without parameters of their own: see `LLM.default_params`."""
        return self._llm.default_params

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, salt: str = ""
    ) -> AsyncStream:
        """Completes one prompt, a text or token ids, once (n must be 1). Needs a running event loop.

        The request starts at once, even if the stream is not read. Reading raises RequestError if the
        request cannot be served.
        """
        return self._open(lambda: self._llm.encode(prompt), sampling_params, salt)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        salt: str = "",
    ) -> AsyncStream:
        """Answers one conversation, in the model's chat template."""
        return self._open(lambda: self._llm.encode_chat(messages), sampling_params, salt)

    def metrics(self) -> dict[str, Any]:
        """Returns `LLM.metrics` as of the last step."""
        return as_metrics(self._worker.stats)

    def close(self) -> None:
        """Cancels everything and ends the thread; waits for the running step."""
        self._stop()

    def _open(
        self, encode: Callable[[], Sequence[int]], params: SamplingParams | None, salt: str
    ) -> AsyncStream:
        worker, mailbox = self._worker, Mailbox(asyncio.get_running_loop())
        stream = AsyncStream(self, worker, mailbox)
        chosen = self.default_params if params is None else params

        def submit() -> None:  # holds no stream
            try:
                worker.submit(Submit(mailbox, encode(), chosen, salt))
            except KvantError as fault:
                post(mailbox.loop, [(mailbox, fault)])
            except Exception as fault:
                unread = EngineFault(f"the prompt could not be read: {fault!r}")
                post(mailbox.loop, [(mailbox, unread)])

        # Tokenising a long text takes a while and must not block the event loop.
        mailbox.loop.run_in_executor(None, submit)
        return stream
