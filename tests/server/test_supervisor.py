"""The supervisor by itself: what it does where the engine, or this server's own code, goes wrong."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvant.plan.settings import Settings
from kvant.server.config import Restarts
from kvant.server.messages import Report, Stats, encode
from kvant.server.supervisor import Supervisor


class Engine:
    """What the supervisor sees of a process and its socket."""

    def __init__(self, *said: bytes) -> None:
        self.said = list(said)
        self.killed = False
        self.pid = 1

    async def recv(self) -> bytes:
        return self.said.pop(0) if self.said else await asyncio.Future()

    def kill(self) -> None:
        self.killed = True


def fails(*reports: Report) -> None:
    raise RuntimeError("our own bug")


def supervisor(on_report: Any = lambda before, report: None) -> Supervisor:
    return Supervisor(
        Settings(), Restarts(), on_ready=lambda ready: None,
        on_loading=lambda news: None, on_report=on_report,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "on_report"),
    [(b"\xc1 is no message", lambda before, report: None), (encode(Report(Stats())), fails)],
    ids=["no message", "our own bug"],
)
def test_what_cannot_be_taken_ends_the_engine_at_once_and_is_logged(
    said: bytes, on_report: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, engine = supervisor(on_report), Engine(said)
    made._process = engine  # type: ignore[assignment]
    asyncio.run(asyncio.wait_for(made._read(engine), 1))  # type: ignore[arg-type]
    assert engine.killed
    assert "could not be taken" in caplog.text


def test_an_engine_that_is_being_started_when_the_server_stops_is_ended() -> None:
    async def stopped_at_once() -> int:
        made = supervisor()
        running = asyncio.create_task(made.run())
        while made._socket is None:
            await asyncio.sleep(0)
        assert made.pid is None  # its process is not there yet
        await made.stop()
        return await asyncio.wait_for(running, 20)

    start = time.monotonic()
    assert asyncio.run(stopped_at_once()) == 0
    assert time.monotonic() - start < 10
