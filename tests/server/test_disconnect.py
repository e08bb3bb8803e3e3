"""A client that leaves, streaming or not, gives its pages back within a second."""

from __future__ import annotations

import json
import random
import socket
import threading
import time

import pytest

from tests.server.harness import Server, events

LONG = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


def _send(server: Server, body: dict[str, object]) -> socket.socket:
    """A request on a raw socket whose answer is never read."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    sock.sendall(head.encode() + data)
    return sock


def _wait_running(server: Server) -> None:
    ended = time.monotonic() + 10
    while server.metric("kvant:num_requests_running") == 0:
        assert time.monotonic() < ended, "it never ran"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_frees_the_pages_within_a_second(server: Server, stream: bool) -> None:
    server.wait_idle(5)
    sock = _send(server, {**LONG, "stream": stream})
    _wait_running(server)
    assert server.metric("kvant:pages_held") > 0
    sock.close()
    assert server.wait_idle(5) <= 1.0


def test_random_disconnects_leave_nothing_behind(server: Server) -> None:
    seed = 20
    chance = random.Random(seed)
    engine = server.engine_pid()
    for _ in range(30):
        sock = _send(server, {**LONG, "stream": chance.random() < 0.5, "n": chance.choice((1, 2))})
        time.sleep(chance.random() * 0.15)
        sock.close()
    assert server.wait_idle(5) <= 1.0
    assert server.engine_pid() == engine
    assert server.complete("abc", max_tokens=4).status == 200


def test_others_go_on_while_clients_leave(server: Server) -> None:
    """The control: a cancelled neighbour changes nothing, and what is not left is finished."""
    alone = server.complete("xyz", max_tokens=60, ignore_eos=True).json["choices"]
    found: list[object] = []
    body = {"max_tokens": 60, "ignore_eos": True}
    stays = threading.Thread(
        target=lambda: found.append(server.complete("xyz", **body).json["choices"])
    )
    leaves = [_send(server, {**LONG, "stream": True}) for _ in range(4)]
    stays.start()
    for sock in leaves:
        sock.close()
    stays.join(30)
    assert found == [alone]
    server.wait_idle(5)


def test_a_stream_that_is_read_to_its_end_ends_with_done(server: Server) -> None:
    with server.open_stream(max_tokens=50) as response:
        chunks = events(response.read())
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
