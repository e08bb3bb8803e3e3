"""The checks before every route: header limits, API key, foreign web pages, the size of the body."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware

from kvant.server.access import is_loopback
from kvant.server.api_error import ApiError, Disconnected
from kvant.server.config import Limits, ServerConfig

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

LOOPBACK_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_LOOPBACK = re.compile(LOOPBACK_ORIGIN)


class Guard:
    """Decides from a request's head alone. The path is the scope's, never one that a header can forge."""

    def __init__(self, config: ServerConfig) -> None:
        self._limits = config.limits
        self._keys = tuple(key.encode() for key in config.api_keys)
        self._origins = frozenset(config.allowed_origins)
        self._any_origin = "*" in self._origins
        # With a key, or where the whole network is let in, a forged name gives a page nothing.
        self._hosts: frozenset[str] | None = None
        if is_loopback(config.host) and not self._keys and not self._any_origin:
            named = (urlsplit(origin).hostname or "" for origin in self._origins)
            self._hosts = frozenset({"localhost", "127.0.0.1", "::1", config.host, *named})

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
            # All keys are compared, so that the time reveals nothing.
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
        """Without a key, refuses web pages of other origins.

        A browser sends simple requests across origins without asking first, so the page's Origin decides.
        A page whose name was bound to this machine's address (DNS rebinding) has the server's own origin;
        its Host header betrays it.
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
    """The first header of this lower-case name."""
    return next((value for found, value in headers if found == name), None)


def _given_key(headers: Headers) -> bytes:
    """The key in `Authorization: Bearer KEY`, else in `X-Api-Key: KEY`; empty without."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
    return (header(headers, b"x-api-key") or b"").strip()


async def read_body(headers: Headers, receive: Receive, limits: Limits) -> bytes:
    """Returns the whole body. ApiError 413 before more than the limit is in memory, 400 for a body that is
    not plain JSON; Disconnected.
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
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("retry-after", "x-should-retry", "x-request-id"),
        max_age=600,
    )
