"""What attackers and unlucky machines do to a server, and what it must not cost the others."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from kvant.sampling.sampling_params import SamplingParams
from kvant.server.config import Limits
from kvant.server.requests import Facts, read_chat, read_completion
from tests.server.harness import Server, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
GOOD = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()


def test_a_pause_of_the_api_process_does_not_cost_the_engine(model: Path) -> None:
    with Server(model, ("--engine-timeout", "1")) as server:
        engine = server.engine_pid()
        with server.open_stream(max_tokens=3000) as response:  # its head comes with its first token
            os.kill(server.process.pid, signal.SIGSTOP)
            time.sleep(3.0)
            os.kill(server.process.pid, signal.SIGCONT)
            assert response.status == 200
            chunks = events(response.read())
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.engine_pid() == engine
        assert server.metric("kvant:engine_deaths_total") == 0
        # The control: an engine that is silent while the API process listens is ended.
        os.kill(engine, signal.SIGSTOP)
        ended = time.monotonic() + 20
        while server.metric("kvant:engine_deaths_total") == 0:
            assert time.monotonic() < ended
            time.sleep(0.05)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "https://evil.example", "Content-Type": "text/plain"},
        {"Origin": "null"},
        {"Origin": "http://localhost.evil.example"},
        {"Host": "evil.example"},
        {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
    ],
    ids=str,
)
def test_without_a_key_pages_of_others_are_refused(server: Server, headers: dict[str, str]) -> None:
    answer = server.send("POST", COMPLETIONS, GOOD, headers)
    assert answer.status == 403
    assert answer.error["code"] in ("foreign_origin", "foreign_host")
    assert "access-control-allow-origin" not in answer.headers
    assert server.send("GET", "/v1/models", headers=headers).status == 403


def test_this_machines_own_pages_and_names_are_served(server: Server) -> None:
    for headers in (
        {}, {"Host": f"localhost:{server.port}"}, {"Host": "LOCALHOST"}, {"Host": "[::1]:8000"},
        {"Origin": "http://localhost:3000"}, {"Origin": "http://127.0.0.1"},
    ):  # fmt: skip
        assert server.send("POST", COMPLETIONS, GOOD, headers).status == 200


def test_a_killed_template_process_costs_no_answer(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "temperature": 0}
    before = server.post(CHAT, body)
    assert before.status == 200
    for _ in range(3):
        os.kill(server.child("template"), signal.SIGKILL)
        again = server.post(CHAT, body)
        assert again.status == 200, again.body
        assert again.json["choices"] == before.json["choices"]


def test_a_template_process_that_always_dies_is_an_api_error(server: Server) -> None:
    killing, killed = threading.Event(), threading.Event()

    def kill() -> None:
        while not killing.wait(0.005):
            try:
                os.kill(server.child("template"), signal.SIGKILL)
            except (AssertionError, OSError, ProcessLookupError):
                continue
            killed.set()

    killer = threading.Thread(target=kill)
    killer.start()
    assert killed.wait(30), "the process of the start could answer before it dies"
    try:
        # On a busy machine a new process can answer before the killer runs again.
        for _ in range(20):
            answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 2})
            if answer.status != 200:
                break
    finally:
        killing.set()
        killer.join()
    assert answer.status in (400, 503)
    assert "template" in answer.error["message"]
    # The last kill may hit the process that the next request starts.
    later = (server.post(CHAT, {"messages": HELLO, "max_tokens": 2}).status for _ in range(3))
    assert 200 in later


def test_large_bodies_are_parsed_in_a_blink() -> None:
    """The event loop waits meanwhile, so what counts is the processor's time, undisturbed at best."""
    facts = Facts(("m",), 2**21, 200_000, True, SamplingParams())
    ids = json.dumps({"prompt": [150_000] * 1_000_000}).encode()
    talk = [{"role": "user", "content": "hello"}] * 180_000
    chats = json.dumps({"messages": talk}).encode()
    assert min(len(ids), len(chats)) > 6_000_000
    for data, read in ((ids, read_completion), (chats, read_chat)):
        seconds = []
        for _ in range(3):
            started = time.process_time()
            read(data, Limits(), facts)
            seconds.append(time.process_time() - started)
        assert min(seconds) < 0.6
