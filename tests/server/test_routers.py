"""Two replicas behind vLLM's or SGLang's router from PyPI, one of them killed under load.

A router is a program of its own environment: `pip install vllm-router` or `sglang-router` somewhere, and that
environment's programs on the PATH.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.harness import Server, build_model, events

ROUTERS = {"vllm-router": ("vllm-router",), "sglang-router": ("sglang-router", "launch")}
"""By package: the command."""

FLAGS = ("--device", "cpu", "--max-num-seqs", "4")
SECONDS = 60.0
THREADS = 6

pytestmark = pytest.mark.slow


@dataclass
class Outcome:
    """What a client saw of one request. begun: whether the head of a stream arrived."""

    streams: bool
    is_chat: bool = False
    status: int = 0
    begun: bool = False
    done: bool = False
    seconds: float = 0.0
    fault: str = ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def router(name: str, *replicas: Server) -> Iterator[int]:
    """The port of a router in front of these."""
    port = _free_port()
    urls = [f"http://127.0.0.1:{one.port}" for one in replicas]
    command = [
        *ROUTERS[name], "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port),
        "--policy", "round_robin", "--health-check-interval-secs", "1",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port()),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + SECONDS
        while _ask(port, Outcome(streams=False)).status != 200:
            assert process.poll() is None, "the router ended"
            assert time.monotonic() < end, "the router does not answer"
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ask(port: int, outcome: Outcome, *, prompt: str = "abc", max_tokens: int = 40) -> Outcome:
    """One request through the router, to its end or its fault."""
    started = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    body: dict[str, object] = {
        "model": "llama", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": outcome.streams,
    }  # fmt: skip
    path = "/v1/chat/completions" if outcome.is_chat else "/v1/completions"
    if outcome.is_chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    try:
        sent = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), sent)
        response = connection.getresponse()
        outcome.status = response.status
        if outcome.streams:
            outcome.begun = (
                response.status == 200
            )  # a router that passed it on cannot ask another replica
            outcome.done = outcome.begun and "error" not in events(response.read())[-1]
        else:
            text = response.read()
            outcome.done = response.status == 200 and bool(json.loads(text)["choices"])
            outcome.fault = "" if outcome.done else text.decode(errors="replace")[:200]
    except (OSError, http.client.HTTPException, AssertionError, ValueError) as fault:
        outcome.fault = repr(fault)
    finally:
        connection.close()
        outcome.seconds = time.monotonic() - started
    return outcome


@pytest.mark.parametrize("name", ROUTERS)
def test_no_request_is_lost_that_had_not_begun_to_answer(name: str, tmp_path: Path) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    model = build_model(tmp_path)
    with (
        Server(model, FLAGS) as first,
        Server(model, FLAGS) as second,
        router(name, first, second) as port,
    ):
        outcomes: list[Outcome] = []
        stop = threading.Event()

        def load(number: int) -> None:
            turn = 0
            while not stop.is_set():
                outcome = Outcome(streams=turn % 2 == 0, is_chat=turn % 4 > 1)
                outcomes.append(outcome)
                _ask(port, outcome, prompt=f"client {number} asks {turn}", max_tokens=60)
                turn += 1

        threads = [threading.Thread(target=load, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS
        while first.metric("kvant:num_requests_running") < 2:
            assert time.monotonic() < end, "the router sends nothing to the first replica"
            time.sleep(0.02)
        engine = first.engine_pid()
        os.kill(first.process.pid, signal.SIGKILL)
        os.kill(engine, signal.SIGKILL)
        killed = len(outcomes)
        time.sleep(6)
        stop.set()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a client waits for ever"
        lost = [one for one in outcomes if not one.done and not one.begun]
        assert lost == []
        assert {one.is_chat for one in outcomes if one.done} == {False, True}
        assert sum(one.done for one in outcomes[killed:]) > THREADS
        assert second.wait_idle(SECONDS) < SECONDS
