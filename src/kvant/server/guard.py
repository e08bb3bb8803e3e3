"""What stands before every route, in plain ASGI: header limits, the API key, the limit of the body."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware

from kvant.server.api_error import ApiError
from kvant.server.config import Limits

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY = "kvant.api_key"
"""Where in the scope the key of an authorised request stands."""

_OPEN_PATHS = frozenset({"/health"})
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Where a request takes places in the engine."""


class Guard:
    """Refuses before anything is routed or read. The path is the scope's, never one a header can forge.

    turn_away: why no request to generate could be taken now, whatever its body says; None if it may.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        api_keys: tuple[str, ...],
        turn_away: Callable[[], ApiError | None],
    ) -> None:
        self._app = app
        self._limits = limits
        self._keys = tuple(key.encode() for key in api_keys)
        self._turn_away = turn_away

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets here; the server answers 403 by itself
        try:
            self._check(scope)
        except ApiError as fault:
            await answer_error(send, fault)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if len(headers) > self._limits.header_count or size > self._limits.header_bytes:
            raise ApiError(
                431,
                f"more than {self._limits.header_count} headers or {self._limits.header_bytes} bytes",
                code="headers_too_large",
            )
        if self._keys and scope["path"] not in _OPEN_PATHS:
            given = _given_key(headers)
            # All are compared, so that the time tells nothing.
            if not any([hmac.compare_digest(given, key) for key in self._keys]):
                raise ApiError(
                    401, "no valid API key was given", type="authentication_error",
                    code="invalid_api_key",
                )  # fmt: skip
            scope[KEY] = given.decode()
        length = dict(headers).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._limits.body_bytes:
            raise too_large(self._limits)
        if scope["path"] in GENERATING and scope["method"] == "POST":
            fault = self._turn_away()
            if fault is not None:
                raise fault


def too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"a body has at most {limits.body_bytes} bytes", code="body_too_large")


class Disconnected(Exception):
    """The client left; there is nobody to answer."""


async def read_body(receive: Receive, limits: Limits) -> bytes:
    """The whole body, never more of it in memory than is allowed. ApiError 413; Disconnected."""
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limits.body_bytes:
            raise too_large(limits)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def answer_error(send: Send, fault: ApiError) -> None:
    """The error as a whole answer. Where it is final the connection ends: the body is not read. A client
    that is to try again keeps its connection; its body is dropped as it comes.
    """
    body = msgspec.json.encode(fault.body)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **fault.headers,
    }
    if fault.retry_after is None:
        headers["connection"] = "close"
    if fault.status == 401:
        headers["www-authenticate"] = "Bearer"
    await send(
        {
            "type": "http.response.start",
            "status": fault.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})


def _given_key(headers: list[tuple[bytes, bytes]]) -> bytes:
    """`Authorization: Bearer KEY`, else `X-Api-Key: KEY`; empty without."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
    for name, value in headers:
        if name == b"x-api-key":
            return value.strip()
    return b""


LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def with_cors(app: App, allowed_origins: tuple[str, ...]) -> App:
    """Lets pages of this machine, and of these origins, read answers in a browser.

    Preflight requests carry no key, so they are answered here, in front of the guard.
    """
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_origin_regex=LOOPBACK_ORIGIN,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("retry-after", "x-should-retry"),
        max_age=600,
    )
