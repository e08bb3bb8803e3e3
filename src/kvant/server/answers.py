"""Answers to HTTP requests: the types of a request and its route, and how answers are sent, whole or as
events.

A `Writer` gives an answer its wire form; `kvant.server.choices` has OpenAI's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvant.errors import RequestError
from kvant.server import wire
from kvant.server.api_error import ApiError, Disconnected, as_api_error, internal
from kvant.server.guard import read_body
from kvant.server.messages import Piece
from kvant.server.parameters import NONE, Table
from kvant.server.requests import Generation
from kvant.server.service import Running, Sequence, Service

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Writer(Protocol):
    """Writes the answer to one request in one wire form.

    Methods return encoded events of a stream. For an answer without a stream, the events are dropped and
    `whole` is called at the end.
    """

    @property
    def ping(self) -> bytes: ...

    @property
    def generation(self) -> Generation: ...

    def begin(self, running: Running) -> list[bytes]:
        """Returns the events before the first token."""

    def add(self, running: Running, sequence: Sequence, pieces: list[Piece]) -> list[bytes]:
        """Takes pieces of one sequence. Returns their events."""

    def end(self, running: Running) -> list[bytes]:
        """Returns the events after the last token."""

    def fail(self, fault: ApiError) -> list[bytes]:
        """Returns the events that end a failed stream."""

    def whole(self, running: Running) -> object:
        """Returns the complete answer of a request that has ended, to be encoded as JSON."""


# -- sending -----------------------------------------------------------------------------------


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of `work`. Cancels it and raises Disconnected if the client disconnects.

    The request's body must have been read before, since `receive` is used to wait for the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def num_prompt_tokens(call: Call, generation: Generation) -> int:
    """Returns the number of tokens of a conversation's prompt."""
    assert generation.conversation is not None
    try:
        work = call.service.encode_chat(generation.conversation)
        return len((await unless_disconnected(call.receive, work))[0])
    except RequestError as fault:
        raise as_api_error(fault) from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends a running request as server-sent events, and closes the request in every case.

    The head is sent with the first piece or ping. A failure before it is an ordinary error response, so a
    router in front can retry elsewhere. A later failure is sent as an event. Every complete stream ends with
    the last event of its wire form; a stream without it was cut.
    """

    def __init__(self, service: Service, running: Running, writer: Writer) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._service, self._running, self._writer = service, running, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            limits = self._service.config.limits
            most = limits.request_seconds + limits.ping_seconds
            # It is no error of the server if a client leaves or never reads.
            with contextlib.suppress(Disconnected, OSError, TimeoutError):
                async with asyncio.timeout(most):
                    await unless_disconnected(receive, self._write(send))
        finally:
            self._service.close(self._running)

    async def _write(self, send: Send) -> None:
        has_begun = False
        async for data in self._events():
            if not has_begun:
                has_begun = True
                head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(head)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        """Yields at least one event. Raises only before the first one; later failures become events."""
        writer, running, has_begun = self._writer, self._running, False
        # prompt_logprobs brings up to half a million values with the first piece: write them in a thread.
        heavy = writer.generation.sampling.prompt_logprobs is not None
        try:
            async for news in self._service.events(running):
                if not has_begun:
                    has_begun = True
                    for data in writer.begin(running):
                        yield data
                if news is None:
                    yield writer.ping
                    continue
                for sequence, pieces in _by_sequence(news):
                    if heavy and not sequence.begun:
                        found = await asyncio.to_thread(writer.add, running, sequence, pieces)
                    else:
                        found = writer.add(running, sequence, pieces)
                    for data in found:
                        yield data
            if not has_begun:
                has_begun = True
                for data in writer.begin(running):
                    yield data
            for data in writer.end(running):
                yield data
        except ApiError as fault:
            if not has_begun:
                raise
            for data in writer.fail(fault):
                yield data
        except Exception:
            if not has_begun:
                raise
            _log.exception("a stream failed")
            for data in writer.fail(internal()):
                yield data


def _by_sequence(news: list[tuple[Sequence, Piece]]) -> list[tuple[Sequence, list[Piece]]]:
    found: dict[int, tuple[Sequence, list[Piece]]] = {}
    for sequence, piece in news:
        found.setdefault(sequence.index, (sequence, []))[1].append(piece)
    return list(found.values())


# -- requests and routes ----------------------------------------------------------------------

_LARGE = 128 * 2**10
_Read = TypeVar("_Read")


@dataclass(slots=True)
class Call:
    """One HTTP request. key: its API key. request_id: the client's X-Request-Id.

    counted: numbers for the request log, set by the handler.
    """

    service: Service
    scope: Scope
    receive: Receive
    key: str | None = None
    request_id: bytes | None = None
    counted: dict[str, object] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The owner of the stored responses that this request may read: its API key, or ""."""
        return self.key or ""

    async def read(self, read: Callable[[bytes], _Read]) -> _Read:
        """Reads the body and returns `read(body)`, which runs in a thread if the body is large."""
        limits = self.service.config.limits
        data = await read_body(self.scope["headers"], self.receive, limits)
        return read(data) if len(data) < _LARGE else await asyncio.to_thread(read, data)


def openai_error(fault: ApiError) -> object:
    return fault.body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table of routes. "{model}" in a path matches the rest of it, other names one segment.

    answer: the type of its JSON, or None for text, whose media type is `text`. event: the type of a stream's
    events. parameters: the table of the body's parameters that its type does not have.
    errors: the error statuses of this endpoint beside the common ones. not_now: its status 503 has the
    answer's own type. is_list: the answer is a list of `answer`. generates: it takes places in the engine, so
    a full server refuses it before it reads the body. is_open: it needs no key. fault: the type of an error's
    JSON, and the function that makes it from an ApiError.
    """

    method: str
    path: str
    summary: str
    handle: Callable[[Call], Awaitable[Response]]
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    parameters: Table = NONE
    event: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    not_now: bool = False
    generates: bool = False
    is_open: bool = False
    is_list: bool = False
    text: str = "text/plain"
    fault: tuple[type[msgspec.Struct], Callable[[ApiError], object]] = (wire.Error, openai_error)


async def generate(call: Call, writer: Writer, *, key: str | None) -> Response:
    """Returns the response, whole or as a stream. key: the API key that its cached pages belong to."""
    service, generation = call.service, writer.generation
    if generation.stream:
        running = await service.open(generation, key=key, counted=call.counted)
        return EventStream(service, running, writer)

    async def whole() -> Response:
        running = await service.open(generation, key=key, counted=call.counted)
        if generation.sampling.prompt_logprobs is None:
            return as_json(await finished(service, running, writer))
        # Up to half a million values: encode them in a thread, which does not block other requests.
        answer = await finished(service, running, writer, threaded=True)
        return await asyncio.to_thread(as_json, answer)

    return await unless_disconnected(call.receive, whole())


async def finished(
    service: Service, running: Running, writer: Writer, *, threaded: bool = False
) -> object:
    """Waits for the end of a running request and closes it. Returns the writer's complete answer.

    threaded: write the answer in a thread, because it is large.
    """
    try:
        writer.begin(running)
        async for news in service.events(running):
            for sequence, piece in news or ():
                writer.add(running, sequence, [piece])
        writer.end(running)
        return await asyncio.to_thread(writer.whole, running) if threaded else writer.whole(running)
    finally:
        service.close(running)


def as_json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
