"""Checks before a request reaches its route: deadlines, sizes, the API key, and the web page's origin.

uvicorn itself waits for ever for the rest of a header or body. Refusals of connections that never sent a
whole request have the common error format too.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvant.server.access import is_loopback
from kvant.server.api_error import ApiError, Disconnected, unavailable
from kvant.server.config import Limits, ServerConfig

# -- connections ------------------------------------------------------------------------------

_TOO_LATE = ApiError(408, "the request did not arrive in time", code="receipt_timeout")
_RETRY_SECONDS = 2


def protocol_with(limits: Limits) -> type[asyncio.Protocol]:
    """Returns a protocol class with these limits, for `uvicorn.Config(http=...)`."""

    class DeadlineProtocol(H11Protocol):
        """Enforces deadlines: for a header from the connection or its first byte, for a body after that."""

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
            """Refuses input that is not HTTP or too large. uvicorn calls it while it handles h11's error."""
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
    """Returns the bytes of a whole error response that closes its connection."""
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


# -- heads and bodies -------------------------------------------------------------------------

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_LOOPBACK = re.compile(LOOPBACK_ORIGIN)


class Guard:
    """Checks requests by their head alone: sizes, the API key, and without keys the origin and host."""

    def __init__(self, config: ServerConfig) -> None:
        self._limits = config.limits
        self._keys = tuple(key.encode() for key in config.api_keys)
        self._origins = frozenset(config.allowed_origins)
        self._any_origin = "*" in self._origins
        # The host is not checked with a key, or if any host may connect: a forged name gains nothing then.
        self._hosts: frozenset[str] | None = None
        if is_loopback(config.host) and not self._keys and not self._any_origin:
            named = (urlsplit(origin).hostname or "" for origin in self._origins)
            self._hosts = frozenset({"localhost", "127.0.0.1", "::1", config.host, *named})

    @property
    def any_key(self) -> bytes | None:
        """One of the accepted keys, or None if no key is needed."""
        return self._keys[0] if self._keys else None

    def check(self, scope: Scope, *, is_open: bool) -> str | None:
        """Returns the API key of an authorised request. is_open: this path needs none.

        Raises ApiError 431, 401, 403 or 413.
        """
        headers: Headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if len(headers) > self._limits.header_count or size > self._limits.header_bytes:
            raise ApiError(
                431,
                f"more than {self._limits.header_count} headers or {self._limits.header_bytes} bytes",
                code="headers_too_large",
            )
        key = None
        if not self._keys:
            self._refuse_foreign_pages(headers)
        elif not is_open:
            given = _given_key(headers)
            # Compare all keys, so that the time does not depend on which one matches.
            if not any([hmac.compare_digest(given, key) for key in self._keys]):
                raise ApiError(
                    401, "no valid API key was given", type="authentication_error",
                    code="invalid_api_key",
                )  # fmt: skip
            key = given.decode()
        length = header(headers, b"content-length") or b"0"
        if not length.isdigit() or int(length[:20]) > self._limits.body_bytes:
            raise _too_large(self._limits)
        return key

    def _refuse_foreign_pages(self, headers: Headers) -> None:
        """Raises ApiError 403 for web pages of other origins, on a server without keys.

        Browsers send simple requests across origins without a preflight, so the Origin header is checked. A
        page whose host name was bound to this machine's address (DNS rebinding) has the server's own origin.
        It is detected by its Host header.
        """
        origin = (header(headers, b"origin") or b"").decode("latin-1")
        if origin and not (
            self._any_origin or origin in self._origins or _LOOPBACK.fullmatch(origin)
        ):
            raise ApiError(
                403,
                "this server has no API key and refuses web pages of other origins "
                "(--allowed-origins names the allowed ones)",
                code="foreign_origin",
            )
        if self._hosts is None:
            return
        host = (header(headers, b"host") or b"").decode("latin-1")
        if urlsplit(f"//{host}").hostname not in self._hosts:
            raise ApiError(
                403,
                "this server has no API key and is used through this machine's own names only "
                "(--allowed-origins names other hosts; --api-key lifts this)",
                code="foreign_host",
            )


def header(headers: Headers, name: bytes) -> bytes | None:
    """Returns the first header with this lower-case name, or None."""
    return next((value for found, value in headers if found == name), None)


def _given_key(headers: Headers) -> bytes:
    """Returns the key in `Authorization: Bearer KEY`, else in `X-Api-Key: KEY`, else b""."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
    return (header(headers, b"x-api-key") or b"").strip()


async def read_body(headers: Headers, receive: Receive, limits: Limits) -> bytes:
    """Returns the whole body. Raises ApiError 413 before more than the limit is in memory, ApiError 400 for
    another content type or encoding, and Disconnected.
    """
    kind = header(headers, b"content-type") or b"application/json"
    if kind.split(b";")[0].strip().lower() != b"application/json":
        raise ApiError(400, "the body must be application/json")
    if (header(headers, b"content-encoding") or b"identity") != b"identity":
        raise ApiError(400, "compressed bodies are not accepted")
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limits.body_bytes:
            raise _too_large(limits)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"a body has at most {limits.body_bytes} bytes", code="body_too_large")


def with_cors(app: App, allowed_origins: tuple[str, ...]) -> App:
    """Lets pages of this machine and of these origins read answers in a browser.

    Preflight requests carry no key, so they are answered here, in front of the guard.
    """
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_origin_regex=LOOPBACK_ORIGIN,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("retry-after", "x-should-retry", "x-request-id"),
        max_age=600,
    )
