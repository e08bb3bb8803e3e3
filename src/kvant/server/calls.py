"""One HTTP request and one row of the table of routes: what every endpoint's handler works with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from starlette.responses import Response

from kvant.server import wire
from kvant.server.answers import EventStream, Writer, unless_disconnected
from kvant.server.api_error import ApiError
from kvant.server.guard import Receive, Scope, read_body
from kvant.server.parameters import NONE, Table
from kvant.server.service import Running, Service

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
        """Whose responses this request may read."""
        return self.key or ""

    async def read(self, read: Callable[[bytes], _Read]) -> _Read:
        """Returns the body, read by a function. A large body is read in a thread, so that the event loop
        gets its turns.
        """
        limits = self.service.config.limits
        data = await read_body(self.scope["headers"], self.receive, limits)
        return read(data) if len(data) < _LARGE else await asyncio.to_thread(read, data)


def openai_error(fault: ApiError) -> object:
    return fault.body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table. answer: the type of its JSON, or None for text, whose media type is `text`.

    event: of a stream. parameters: of its body, beside those of the body's type.

    errors: the statuses that only this endpoint has. not_now: status 503 has the answer's own type.
    is_list: the answer is a list of `answer`.
    generates: it takes places in the engine, so a full server refuses it before it reads the body.
    is_open: it needs no key. "{model}" at the end of a path stands for the rest of it, any other name in
    braces for one step. fault: the type of an error's JSON, made from an ApiError by the function.
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
    """The answer to a request, whole or as a stream. key: the API key that its cached pages belong to."""
    service, generation = call.service, writer.generation
    if generation.stream:
        running = await service.open(generation, key=key, counted=call.counted)
        return EventStream(service, running, writer)

    async def whole() -> Response:
        running = await service.open(generation, key=key, counted=call.counted)
        if generation.sampling.prompt_logprobs is None:
            return as_json(await finished(service, running, writer))
        # Up to half a million values: in a thread, so that other requests get their turns.
        answer = await finished(service, running, writer, threaded=True)
        return await asyncio.to_thread(as_json, answer)

    return await unless_disconnected(call.receive, whole())


async def finished(
    service: Service, running: Running, writer: Writer, *, threaded: bool = False
) -> msgspec.Struct:
    """Writes a running request to its end and closes it."""
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
