"""A whole server without HTTP: the same ASGI application, called by methods."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from typing import Any

from kvant.cluster.asking import Asked, Head, Part, Taken
from kvant.plan.settings import Settings
from kvant.server.app import make_app
from kvant.server.config import ServerConfig
from kvant.server.messages import Ready
from kvant.server.metrics import Metrics
from kvant.server.service import Service
from kvant.server.supervisor import StartFault


class Replica:
    """One engine and its ASGI application. Call its methods in one event loop. name: the replica's name."""

    def __init__(self, settings: Settings, config: ServerConfig, name: str) -> None:
        self.name = name
        self._began = asyncio.Event()
        metrics = Metrics(config.served_names[0])
        self._service = Service(
            config, settings, metrics, _say, on_ready=self._on_ready, on_loading=lambda *_: None
        )
        metrics.watch(self._service.supervisor, self._service.admission)
        self._app = make_app(self._service)
        self._watched: asyncio.Task[int] | None = None

    async def start(self) -> None:
        """Returns once the engine takes requests. Raises StartFault if it never does."""
        self._service.renderer.start()
        self._watched = asyncio.create_task(self._service.supervisor.run())
        ready = asyncio.create_task(self._began.wait())
        await asyncio.wait((self._watched, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        self.check()

    def check(self) -> None:
        """Raises StartFault if the engine has ended for good, not while its supervisor restarts it."""
        if self._watched is not None and self._watched.done():
            code = self._watched.result()
            raise StartFault("the engine died too often and is not started again", code)

    async def stop(self) -> None:
        await self._service.supervisor.stop()
        await self._service.renderer.stop()
        if self._watched is not None:
            await asyncio.gather(self._watched, return_exceptions=True)

    async def ask(self, asked: Asked) -> AsyncGenerator[Part, None]:
        """Answers a request; see `Ask`. Pieces that arrive while the reader is busy come as one part."""
        yield Taken(self.name)
        sent: list[Any] = []
        came, left = asyncio.Event(), asyncio.Event()
        body: list[bytes] = [asked.body]

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            came.set()

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
            "method": asked.method, "path": asked.path, "raw_path": asked.path.encode(),
            "query_string": asked.query, "headers": list(asked.headers),
            "client": None, "server": None,
        }  # fmt: skip
        work = asyncio.ensure_future(self._app(scope, receive, send))
        work.add_done_callback(lambda _: came.set())
        try:
            while not (work.done() and not sent):
                await came.wait()
                came.clear()
                messages, sent[:] = list(sent), []
                if messages and messages[0]["type"] == "http.response.start":
                    first = messages.pop(0)
                    yield Head(first["status"], tuple((n, v) for n, v in first["headers"]))
                if data := b"".join(message.get("body", b"") for message in messages):
                    yield data
            await work
        finally:
            left.set()
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work

    def _on_ready(self, ready: Ready) -> None:
        self._service.set_ready(ready)
        self._began.set()


def _say(line: str) -> None:
    """Prints a line, which Ray shows with the actor's name."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
