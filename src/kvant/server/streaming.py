"""Answers that outlive their first byte, and clients that leave before the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvant.server.answers import Shape, usage
from kvant.server.api_error import ApiError, internal
from kvant.server.guard import Disconnected
from kvant.server.messages import Piece
from kvant.server.service import Running, Sequence, Service

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The work's result. Disconnected, and the work cancelled, as soon as the client has left.

    The body must have been read: only a disconnect is left to be received.
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


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A running request as server-sent events; closes it on every path.

    A failure after the first byte is an event with an `error`, and [DONE] ends every stream that the
    client has not left: a stream without it was cut.
    """

    def __init__(
        self,
        service: Service,
        running: Running,
        shape: Shape,
        *,
        include_usage: bool,
        closed: Callable[[], None],
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._service, self._running, self._shape = service, running, shape
        self._include_usage = include_usage
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            limits = self._service.config.limits
            most = limits.request_seconds + limits.ping_seconds
            # A client that left, or that never reads, is no fault of anybody's.
            with contextlib.suppress(Disconnected, OSError, TimeoutError):
                async with asyncio.timeout(most):
                    await unless_disconnected(receive, self._write(send))
        finally:
            self._closed()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for data in self._events():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        head = self._shape.head()
        if self._include_usage:
            head["usage"] = None
        try:
            if roles := self._shape.roles(self._running):
                yield self._event(self._shape.chunk(head, roles))
            async for news in self._service.events(self._running):
                if news is None:
                    yield b": ping\n\n"
                    continue
                choices = [self._shape.part(*one) for one in _by_sequence(news)]
                shown = [choice for choice in choices if _says_something(choice)]
                if shown:
                    yield self._event(self._shape.chunk(head, shown))
            if self._include_usage:
                last = {**self._shape.chunk(head, []), "usage": usage(self._running)}
                yield self._event(last)
        except ApiError as fault:
            yield self._event(fault.body)
        except Exception:
            _log.exception("a stream failed")
            yield self._event(internal().body)
        yield b"data: [DONE]\n\n"

    @staticmethod
    def _event(body: object) -> bytes:
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _by_sequence(news: list[tuple[Sequence, Piece]]) -> list[tuple[Sequence, list[Piece]]]:
    found: dict[int, tuple[Sequence, list[Piece]]] = {}
    for sequence, piece in news:
        found.setdefault(sequence.index, (sequence, []))[1].append(piece)
    return list(found.values())


def _says_something(choice: dict[str, Any]) -> bool:
    shown = (choice["finish_reason"], choice.get("text"), choice.get("delta"), choice["logprobs"])
    return any(shown)
