"""`kvant serve --ray`: serves HTTP in this process, with replicas as an application of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
from ray import serve

from kvant.cluster.asking import Ask, Asked, Part, ReplicaLost
from kvant.cluster.config import ReplicaOptions, start_fault
from kvant.cluster.front import Front
from kvant.cluster.placement import DEPLOYMENT, asker, replicas
from kvant.errors import EngineFault, NotServable, WayOut
from kvant.look import counted
from kvant.plan.settings import Settings
from kvant.server.config import ServerConfig
from kvant.server.serve import FORCED, bind, http_server

_log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve_replicas(
    settings: Settings, config: ServerConfig, options: ReplicaOptions, *, say: Callable[[str], None]
) -> int:
    """Serves until a signal arrives and returns the exit code. Raises KvantError if the start fails."""
    bound = bind(config.host, config.port)
    try:
        say("kvant: starting Ray")
        try:
            ray.init(address=options.ray_address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as fault:
            raise NotServable(
                f"there is no Ray cluster at {options.ray_address or 'RAY_ADDRESS'}",
                why=str(fault),
                ways_out=(WayOut("start one on this machine", ("--ray-address", "local")),),
            ) from None
        try:
            return asyncio.run(_Driver(settings, config, options, bound, say).run())
        finally:
            ray.shutdown()
    finally:
        bound.close()


class _Driver:
    def __init__(
        self,
        settings: Settings,
        config: ServerConfig,
        options: ReplicaOptions,
        bound: socket.socket,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._config, self._options = settings, config, options
        self._bound, self._say = bound, say
        self._name = f"kvant-{uuid.uuid4().hex[:8]}"
        self._ask: Ask | None = None
        self._front = Front(config, self._ask_when_deployed, options.count)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in _SIGNALS:  # Ray has handlers of its own, which would end this process at once
            loop.add_signal_handler(number, signals.put_nowait, number)
        http = http_server(self._front.app, self._config.limits)
        serving = asyncio.create_task(http.serve(sockets=[self._bound]))
        signalled = asyncio.create_task(signals.get())
        deploying = in_thread(self._deploy)
        try:
            await asyncio.wait((serving, signalled, deploying), return_when=asyncio.FIRST_COMPLETED)
            if deploying.done():
                self._ask = asker(deploying.result())
                self._say_ready()
                await asyncio.wait((serving, signalled), return_when=asyncio.FIRST_COMPLETED)
            if not signalled.done():
                return 1
            return await self._drain(signals)
        finally:
            signalled.cancel()
            self._front.end()
            http.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(serving), 3)
            with contextlib.suppress(TimeoutError, Exception):
                await asyncio.wait_for(in_thread(lambda: serve.delete(self._name)), 10)

    def _deploy(self) -> Any:
        """Deploys replicas, waits until all answer, and returns their handle. Raises EngineFault."""
        serve.start(proxy_location="Disabled")
        built = replicas(self._settings, self._config, self._options)
        try:
            return serve.run(built, name=self._name, route_prefix=None)
        except RuntimeError as fault:
            known = serve.status().applications.get(self._name)
            told = "" if known is None else known.deployments[DEPLOYMENT].message
            raise EngineFault(start_fault(told) or f"replicas did not start: {fault}") from None

    async def _ask_when_deployed(self, asked: Asked) -> AsyncGenerator[Part, None]:
        if self._ask is None:
            raise ReplicaLost("replicas are being started")
        async with contextlib.aclosing(self._ask(asked)) as parts:
            async for part in parts:
                yield part

    async def _drain(self, signals: asyncio.Queue[int]) -> int:
        """Refuses new requests and waits for open ones, until a timeout or a second signal."""
        self._front.draining = True
        if self._front.num_open:
            held = counted(self._front.num_open, "request")
            self._say(f"kvant: shutting down; waiting for {held}")
        forced = asyncio.create_task(signals.get())
        end = time.monotonic() + self._config.shutdown_timeout
        while self._front.num_open and time.monotonic() < end and not forced.done():
            await asyncio.wait((forced,), timeout=0.05)
        code = FORCED if forced.done() else 0
        forced.cancel()
        return code

    def _say_ready(self) -> None:
        host, port = self._bound.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        key = "an API key is needed" if self._config.api_keys else "no API key"
        most = self._options.most or self._options.count
        count = counted(most, "replica")
        if most > self._options.count:
            count = f"{self._options.count} to {count}"
        self._say(f"kvant: {count}, application {self._name}")
        self._say(f"kvant: ready: {self._config.served_names[0]} on {url} ({key})")


def in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """Runs a blocking call in a daemon thread, which does not keep the process alive."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, fault: BaseException | None) -> None:
        if not found.done():
            found.set_result(result) if fault is None else found.set_exception(fault)

    def run() -> None:
        result, fault = None, None
        try:
            result = call()
        except BaseException as caught:
            fault = caught
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=run, daemon=True).start()
    return found
