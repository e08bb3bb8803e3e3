"""Engines that die, hang or cannot start, and servers that are told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import forked
from tests.server.harness import FORKED, Answer, Server, events

LONG = {"max_tokens": 4000, "ignore_eos": True}


def _until(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took until the condition held; fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not come in time"
        time.sleep(0.01)
    return time.monotonic() - started


class _Clients:
    """Some streams and some plain calls, each in a thread, with the time of their end."""

    def __init__(self, server: Server, streams: int, plain: int, **more: object) -> None:
        self.bodies: list[bytes] = []
        self.answers: list[Answer] = []
        self.ends: list[float] = []
        body = {**LONG, **more}

        def stream() -> None:
            with server.open_stream(**body) as response:
                self.bodies.append(response.read())
            self.ends.append(time.monotonic())

        def call() -> None:
            self.answers.append(server.complete("abc", **body))
            self.ends.append(time.monotonic())

        targets = [stream] * streams + [call] * plain
        self.threads = [threading.Thread(target=target) for target in targets]
        for thread in self.threads:
            thread.start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(30)
        assert len(self.ends) == len(self.threads), "a request was never answered"


def _stop(server: Server, number: int = signal.SIGTERM) -> None:
    server.process.send_signal(number)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return False


def test_a_killed_engine_costs_its_requests_an_error_and_comes_back(model: Path) -> None:
    with Server(model, ("--max-num-seqs", "8")) as server:
        golden = server.complete("xyz", max_tokens=8).json["choices"]
        clients = _Clients(server, streams=6, plain=6)
        _until(lambda: server.metric("kvant:num_requests_running") == 8, 10)
        first = server.engine_pid()
        killed = time.monotonic()
        os.kill(first, signal.SIGKILL)
        assert _until(lambda: server.get("/health").status == 503, 5) <= 1.0
        refused = server.complete("abc")
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        clients.join()
        assert max(clients.ends) - killed <= 2.0
        for body in clients.bodies:
            assert events(body)[-1]["error"]["code"] == "engine_died"
        assert {answer.status for answer in clients.answers} == {503}
        assert all(answer.error["code"] == "engine_died" for answer in clients.answers)
        _until(lambda: server.get("/ready").status == 200, 60)
        assert server.engine_pid() != first
        assert server.complete("xyz", max_tokens=8).json["choices"] == golden
        assert server.metric("kvant:engine_deaths_total") == 1


def test_a_stream_that_has_not_begun_ends_with_a_status_that_routers_try_again(model: Path) -> None:
    with Server(model) as server:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)  # no token comes
        answers: list[Answer] = []
        body = {"prompt": "abc", "stream": True, "max_tokens": 4}
        asking = threading.Thread(
            target=lambda: answers.append(server.post("/v1/completions", body)), daemon=True
        )
        asking.start()
        time.sleep(0.5)
        assert asking.is_alive()
        os.kill(engine, signal.SIGKILL)
        asking.join(20)
        assert answers[0].status == 503
        assert answers[0].json["error"]["type"] == "server_error"


def test_sigterm_lets_running_requests_finish_and_ends_with_0(model: Path) -> None:
    with Server(model) as server:
        engine = server.engine_pid()
        clients = _Clients(server, streams=2, plain=2, max_tokens=400)
        _until(lambda: server.metric("kvant:num_requests_running") == 4, 10)
        _stop(server)
        assert _until(lambda: server.get("/ready").status == 503, 5) <= 0.5
        assert server.get("/health").status == 200
        refused = server.complete("abc")
        assert refused.status == 503
        assert refused.error["code"] == "draining"
        assert "retry-after" in refused.headers
        clients.join()
        assert {answer.status for answer in clients.answers} == {200}
        for body in clients.bodies:
            assert events(body)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(5) == 0
        assert not _alive(engine)


@pytest.mark.slow
def test_without_time_to_drain_clients_get_an_error_and_the_server_ends_within_four_seconds(
    model: Path,
) -> None:
    with Server(model, ("--shutdown-timeout", "0")) as server:
        engine = server.engine_pid()
        clients = _Clients(server, streams=1, plain=1)
        _until(lambda: server.metric("kvant:num_requests_running") == 2, 10)
        started = time.monotonic()
        _stop(server)
        assert server.process.wait(10) == 0
        assert time.monotonic() - started < 4
        clients.join()
        assert events(clients.bodies[0])[-1]["error"]["code"] == "shutting_down"
        assert clients.answers[0].status == 503
        assert clients.answers[0].error["code"] == "shutting_down"
        assert not _alive(engine)


@pytest.mark.slow
def test_a_second_signal_forces(model: Path) -> None:
    with Server(model) as server:
        clients = _Clients(server, streams=1, plain=0)
        _until(lambda: server.metric("kvant:num_requests_running") == 1, 10)
        _stop(server)
        _until(lambda: server.get("/ready").status == 503, 5)
        _stop(server, signal.SIGINT)
        assert server.process.wait(4) == 130
        clients.join()


@pytest.mark.slow
def test_no_restart_ends_with_70(model: Path) -> None:
    with Server(model, ("--no-restart",)) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(10) == 70


@pytest.mark.slow
def test_an_engine_that_dies_too_often_is_given_up_with_70(model: Path) -> None:
    with Server(model) as server:
        for death in range(4):
            _until(lambda: server.get("/ready").status == 200, 60)
            os.kill(server.engine_pid(), signal.SIGKILL)
            if death < 3:
                _until(lambda: server.get("/ready").status == 503, 5)
        assert server.process.wait(10) == 70


@pytest.mark.slow
def test_a_hanging_engine_is_noticed_and_replaced(model: Path) -> None:
    with Server(model, ("--engine-timeout", "2")) as server:
        first = server.engine_pid()
        clients = _Clients(server, streams=1, plain=1)
        _until(lambda: server.metric("kvant:num_requests_running") == 2, 10)
        os.kill(first, signal.SIGSTOP)
        assert _until(lambda: server.get("/health").status == 503, 10) <= 3.5
        clients.join()
        assert {answer.status for answer in clients.answers} == {503}
        _until(lambda: server.get("/ready").status == 200, 60)
        assert not _alive(first)


@pytest.mark.slow
def test_a_killed_server_leaves_no_engine_behind(model: Path) -> None:
    with Server(model) as server:
        engine = server.engine_pid()
        server.process.kill()
        server.process.wait()
        _until(lambda: not _alive(engine), 5)


# -- start-up ----------------------------------------------------------------------------------


def _fails(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a server that must not start."""
    started = time.monotonic()
    done = forked.run((*FORKED, *arguments), timeout=60)
    assert time.monotonic() - started < 30
    text = done.stdout + done.stderr
    assert "Traceback" not in text
    assert "ready:" not in text
    return done.returncode, text


def test_a_port_in_use_is_reported_before_a_model_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, text = _fails(str(model), "--port", port)
    assert code == 2
    assert f"--port {port}" in text
    assert "--port 0" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--kv-cache-dtype", "fp9"), "fp9"),
        (("--kv-cache-memory", "100KiB", "--max-model-len", "4096"), "--max-model-len"),
        pytest.param(("--max-model-len", "4096000"), "--max-model-len", marks=pytest.mark.slow),
        pytest.param(("--kv-cache-memory", "1000000GiB"), "does not fit", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_ends_with_one_block_and_2(
    model: Path, flags: tuple[str, ...], said: str
) -> None:
    code, text = _fails(str(model), "--port", "0", *flags)
    assert code == 2
    assert text.count("kvant: error:") == 1
    assert said in text


def test_a_missing_model_ends_with_2(tmp_path: Path) -> None:
    code, text = _fails(str(tmp_path / "nothing"), "--port", "0")
    assert code == 2
    assert "nothing" in text


@pytest.mark.slow
def test_a_broken_checkpoint_ends_with_one_block(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config)[:-5])
    code, text = _fails(str(tmp_path), "--port", "0")
    assert code == 2
    assert "config.json" in text


@pytest.mark.slow
def test_weights_that_are_no_numbers_end_with_one_block_that_names_them(
    model: Path, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    code, text = _fails(str(tmp_path), "--port", "0")
    assert code == 2
    assert text.count("kvant: error:") == 1
    assert "model.norm.weight" in text


def test_the_network_is_not_let_in_without_a_key(model: Path) -> None:
    code, text = _fails(str(model), "--port", "0", "--host", "0.0.0.0")
    assert code == 2
    assert "--insecure-no-auth" in text
    assert "--api-key" in text
