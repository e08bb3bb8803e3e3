"""uvicorn's h11 protocol with deadlines: a request that does not arrive in time ends its connection.

uvicorn itself waits forever for the rest of a header or of a body. Refusals here, before there is a
request, have the common format too.
"""

from __future__ import annotations

import asyncio
import sys
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvant.server.api_error import ApiError, unavailable
from kvant.server.config import Limits

_TOO_LATE = ApiError(408, "the request did not arrive in time", code="receipt_timeout")
_RETRY_SECONDS = 2


def protocol_with(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`."""

    class DeadlineProtocol(H11Protocol):
        """Deadlines start at the connection or a header's first byte, and for a body at its headers."""

        _timer: asyncio.TimerHandle | None = None
        _awaited: type | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._refuse(
                    unavailable(
                        f"this server has {limits.connections} connections and takes no more",
                        code="too_many_connections",
                        retry_after=_RETRY_SECONDS,
                    )
                )
                return
            self._await(h11.IDLE, limits.header_seconds)

        def data_received(self, data: bytes) -> None:
            if self.conn.their_state is h11.IDLE and self._awaited is None:
                self._await(h11.IDLE, limits.header_seconds)
            super().data_received(data)

        def handle_events(self) -> None:
            super().handle_events()
            state = self.conn.their_state
            if state is h11.SEND_BODY:
                if self._awaited is not h11.SEND_BODY:
                    self._await(h11.SEND_BODY, limits.body_seconds)
            elif state is not h11.IDLE or self._awaited is h11.SEND_BODY:
                self._disarm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _await(self, state: type, seconds: float) -> None:
            self._disarm()
            self._awaited = state
            self._timer = self.loop.call_later(seconds, self._too_late)

        def _disarm(self) -> None:
            self._awaited = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_late(self) -> None:
            self._timer = None
            if self.transport.is_closing():
                return
            if self._awaited is h11.IDLE:  # no byte of an answer was sent yet
                self._refuse(_TOO_LATE)
            else:
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            """Called while a h11.RemoteProtocolError is handled: the input is not HTTP, or too large."""
            fault = sys.exception()
            status = fault.error_status_hint if isinstance(fault, h11.RemoteProtocolError) else 400
            if self.conn.our_state is h11.IDLE:
                self._refuse(ApiError(status, msg, code="bad_http"))
            else:
                self.transport.close()

        def _refuse(self, fault: ApiError) -> None:
            self._disarm()
            self.transport.write(_whole(fault))
            self.transport.close()

    return DeadlineProtocol


def _whole(fault: ApiError) -> bytes:
    """The answer, head and body, that ends its connection."""
    body = msgspec.json.encode(fault.body)
    headers = {
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **fault.headers,
    }
    lines = [f"HTTP/1.1 {fault.status} {HTTPStatus(fault.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode() + body
