"""uvicorn's h11 protocol with deadlines: a request that does not arrive in time ends its connection.

uvicorn itself waits for ever for the rest of a header or of a body.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvant.server.config import Limits

_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
_BODY = (
    b'{"error":{"message":"the request did not arrive in time",'
    b'"type":"invalid_request_error","param":null,"code":"receipt_timeout"}}'
)


def protocol_with(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`."""

    class DeadlineProtocol(H11Protocol):
        """For headers from their first byte, or from the connection; for a body from its headers."""

        _timer: asyncio.TimerHandle | None = None
        _awaited: type | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
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
            if not self.transport.is_closing():
                if self._awaited is h11.IDLE:
                    # Nothing of an answer is on the wire yet.
                    self.transport.write(_TIMEOUT % (len(_BODY), _BODY))
                self.transport.close()

    return DeadlineProtocol
