"""The API process: binds its address, starts the engine, answers requests, drains, and returns an exit code.

Nothing in this process imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from kvant.errors import BadValue, WayOut
from kvant.kv.memory import format_size, format_tokens
from kvant.look import counted
from kvant.plan.settings import Settings
from kvant.sampling.generation_defaults import recommendation
from kvant.server.app import make_app
from kvant.server.config import Limits, ServerConfig
from kvant.server.guard import App, protocol_with
from kvant.server.messages import Loading, Ready
from kvant.server.metrics import Metrics
from kvant.server.service import Service

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FORCED = 130
_SECONDS_BETWEEN_LINES = 10.0
_REQUEST_LINE = 8 * 2**10


def serve(settings: Settings, config: ServerConfig, *, say: Callable[[str], None]) -> int:
    """Serves until a signal arrives. Returns the exit code. say: prints a line for the user.

    Raises KvantError if the start fails for a reason that the user can fix.
    """
    bound = bind(config.host, config.port)
    try:
        return asyncio.run(_Server(settings, config, bound, say).run())
    finally:
        bound.close()


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket, before a model is loaded, so that a port in use is reported early.

    Raises BadValue if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is named. Otherwise the second write of an
    # answer waits 40 ms for the first one's acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)  # a second server fails here, although SO_REUSEADDR lets it bind
    except OSError as fault:
        sock.close()
        raise BadValue(
            f"--host {host} --port {port} cannot be listened on",
            why=fault.strerror or str(fault),
            ways_out=(WayOut("take any free port", ("--port", "0")),),
        ) from None
    sock.setblocking(False)
    return sock


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers, because this module decides when to drain."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def http_server(app: App, limits: Limits) -> uvicorn.Server:
    """Returns a uvicorn server of this application that leaves signals to its caller."""
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=protocol_with(limits),
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_seconds,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=limits.header_bytes + _REQUEST_LINE,
        )
    )


@dataclass(slots=True)
class _Server:
    settings: Settings
    config: ServerConfig
    bound: socket.socket
    say: Callable[[str], None]

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        metrics = Metrics(self.config.served_names[0])
        service = Service(
            self.config,
            self.settings,
            metrics,
            self.say,
            on_ready=lambda ready: self._on_ready(service, ready),
            on_loading=_LoadingLog(self.say),
        )
        supervisor = service.supervisor
        metrics.watch(supervisor, service.admission)
        service.renderer.start()
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in _SIGNALS:
            loop.add_signal_handler(number, signals.put_nowait, number)
        http = http_server(make_app(service), self.config.limits)
        watched = asyncio.create_task(supervisor.run())
        serving = asyncio.create_task(http.serve(sockets=[self.bound]))
        signalled = asyncio.create_task(signals.get())
        try:
            await asyncio.wait((watched, serving, signalled), return_when=asyncio.FIRST_COMPLETED)
            if signalled.done() and not watched.done():
                return await self._drain(service, http, serving, signals)
            return watched.result() if watched.done() else 1
        finally:
            signalled.cancel()
            http.should_exit = True
            service.responses.end_all()
            await supervisor.stop()
            await service.renderer.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(watched, serving, return_exceptions=True), 3)

    async def _drain(
        self,
        service: Service,
        http: uvicorn.Server,
        serving: asyncio.Task[None],
        signals: asyncio.Queue[int],
    ) -> int:
        """Refuses new requests and waits for running ones, until a timeout or a second signal."""
        service.draining = True
        held = service.admission.held
        if held:
            waited = counted(held, "sequence")
            self.say(f"kvant: shutting down; waiting for {waited} (signal again to force)")
        forced = asyncio.create_task(signals.get())
        ended = time.monotonic() + self.config.shutdown_timeout
        while service.admission.held and time.monotonic() < ended and not forced.done():
            await asyncio.wait((forced,), timeout=0.05)
        http.should_exit = True
        http.force_exit = forced.done()
        if service.admission.held:
            # Open streams then end with an error event.
            await service.supervisor.stop()
        await asyncio.wait((serving, forced), timeout=2, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            http.force_exit = True
        code = FORCED if forced.done() else 0
        forced.cancel()
        return code

    def _on_ready(self, service: Service, ready: Ready) -> None:
        first = service.facts is None
        service.set_ready(ready)
        if not first:
            _log.warning("the engine serves again")
            return
        # Exempt all imported objects from collection: searching them would stop every answer for 50 ms,
        # repeatedly. Garbage of requests is collected as usual.
        gc.collect()
        gc.freeze()
        host, port = self.bound.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        name = self.config.served_names[0]
        facts = service.facts
        assert facts is not None
        for note in ready.notes:
            self.say(f"kvant: {note}")
        if recommended := recommendation(facts.defaults):
            self.say(
                f"kvant: where a request does not say, the model's own values hold: {recommended}"
            )
        key = "an API key is needed" if self.config.api_keys else "no API key"
        header = " -H 'Authorization: Bearer KEY'" if self.config.api_keys else ""
        self.say(
            f"kvant: KV cache: {ready.stored_as}; {ready.bytes_per_token:,} bytes a token; "
            f"{format_size(ready.pool_bytes)} hold {format_tokens(ready.capacity_tokens)} tokens, "
            f"{ready.max_model_len:,} a sequence"
        )
        self.say(f"kvant: try: curl {url}/v1/models{header}")
        self.say(f"kvant: ready: {name} on {url} ({key})")


class _LoadingLog:
    """Prints a line per task of the start, and every ten seconds a long task's progress and time left."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._told: set[str] = set()
        self._task = ""
        self._began = (0.0, 0)  # time of the task's first report, done then
        self._said = clock()

    def __call__(self, news: Loading) -> None:
        now, task, total = self._clock(), news.task, news.total
        if task != self._task:  # also when the engine is started again
            self._task, self._began, self._said = task, (now, news.done), now
        if task not in self._told:
            self._told.add(task)
            size = format_size(total) if news.unit == "bytes" else f"{total} {news.unit}"
            self._say(f"kvant: {task} ({size})" if total else f"kvant: {task}")
        elif total and now >= self._said + _SECONDS_BETWEEN_LINES:
            begin, had = self._began
            speed = (news.done - had) / (now - begin)
            left = f", {(total - news.done) / speed:.0f} s left" if speed else ""
            self._say(f"kvant: {task}: {news.done / total:.0%}{left}")
        else:
            return
        self._said = now


def log_to_stderr() -> None:
    """Sets up logging of warnings and errors as plain lines to stderr."""
    logging.basicConfig(stream=sys.stderr, format="kvant: %(message)s", level=logging.WARNING)
