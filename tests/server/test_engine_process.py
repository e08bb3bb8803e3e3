"""The engine's process by itself: what it says where it cannot start."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvant.errors import BadValue
from kvant.plan.settings import Settings
from kvant.server import engine_process
from kvant.server.messages import Fault, Report, Stats, encode, read_from_engine


def refused(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> tuple[int, Fault]:
    """Exit code and last words of a process that meets this."""

    def fails(settings: Settings) -> None:
        raise fault

    stdin = SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(Settings()) + b"\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(engine_process, "_end_with_parent", lambda: None)
    monkeypatch.setattr(engine_process, "engine_config", fails)
    address = f"ipc://{directory}/socket"
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind(address)
        code = engine_process.main(address)
        assert socket.poll(5000)
        said = read_from_engine(socket.recv())
    assert isinstance(said, Fault)
    return code, said


def test_a_fault_of_our_own_is_logged_with_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, said = refused(ZeroDivisionError("by zero"), monkeypatch, tmp_path)
    assert (code, said.exit_code) == (1, 1)
    assert "ZeroDivisionError" in said.message
    assert "Traceback" in caplog.text


def test_an_error_that_the_user_can_correct_is_reported_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        code, said = refused(BadValue("no such thing"), monkeypatch, tmp_path)
    assert (code, said.message) == (2, "no such thing")
    assert not caplog.text


def test_the_first_report_does_not_wait_for_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    done: list[object] = []

    def poll(wait: int) -> bool:
        if len(done) > 1:
            raise Ended
        done.append(wait)
        return False

    def send(report: bytes) -> None:
        done.append(report)

    first = Report(Stats(num_usable_pages=7))
    monkeypatch.setattr(engine_process, "report_of", lambda driver, events: first)
    driver: Any = SimpleNamespace(has_work=False, step=list)
    socket: Any = SimpleNamespace(poll=poll, send=send)
    with pytest.raises(Ended):
        engine_process._serve(driver, socket, None)
    assert done == [0, encode(first)]
