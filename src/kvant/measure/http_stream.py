"""One request to an OpenAI-compatible server, as server-sent events with their times.

Uses only h11 and asyncio, so that a client's own time does not distort the server's.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from kvant.errors import BadValue

_READ = 65536


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server. base: path before /v1. headers: sent with every request."""

    host: str
    port: int
    tls: bool
    base: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event. at: time.perf_counter() when its bytes were read."""

    at: float
    data: str


class Refused(Exception):
    """The server answered with a status other than 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


class Cut(Exception):
    """The connection ended before the answer did."""


def parse_target(url: str, api_key: str | None = None) -> Target:
    """Parses http://HOST[:PORT][/PATH] or https; a trailing /v1 is allowed.

    Raises BadValue for anything else.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadValue(f"{url} is no server", why="it is a URL such as http://127.0.0.1:8000")
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    headers = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
    return Target(parts.hostname, parts.port or (443 if tls else 80), tls, base, headers)


async def fetch(target: Target, path: str) -> str:
    """Returns the body of a GET. Raises Refused, Cut or OSError."""
    async with _asked(target, "GET", path, None) as pieces:
        return b"".join([body async for _, body in pieces]).decode()


async def stream(target: Target, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
    """Yields the events of a POST, without [DONE]. Raises Refused, Cut or OSError. Closing it disconnects."""
    rest = b""
    async with _asked(target, "POST", path, json.dumps(body).encode()) as pieces:
        async for at, data in pieces:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and text != b"[DONE]":
                    yield Event(at, text.decode())


@asynccontextmanager
async def _asked(
    target: Target, method: str, path: str, body: bytes | None
) -> AsyncIterator[AsyncIterator[tuple[float, bytes]]]:
    """Yields the body of a 200 as it arrives, over a new connection that is closed at the end."""
    context = ssl.create_default_context() if target.tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
    try:
        connection = h11.Connection(h11.CLIENT)
        headers = [("host", target.authority), ("connection", "close"), *target.headers]
        if body is not None:
            headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
        asked = h11.Request(method=method, target=target.base + path, headers=headers)
        writer.write(connection.send(asked) or b"")
        if body is not None:
            writer.write(connection.send(h11.Data(data=body)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        pieces = _body(connection, reader)
        status, _ = await anext(pieces)
        if status != 200:
            found = b"".join([data async for _, data in pieces])
            raise Refused(int(status), found.decode(errors="replace"))
        yield pieces
    finally:
        writer.close()


async def _body(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> AsyncIterator[tuple[float, bytes]]:
    """Yields (status, b"") first, then (time, bytes) until the end."""
    at = 0.0
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as fault:
            raise Cut(str(fault)) from None
        if event is h11.NEED_DATA:
            data = await reader.read(_READ)
            at = time.perf_counter()
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            yield event.status_code, b""
        elif isinstance(event, h11.Data):
            yield at, bytes(event.data)
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return
