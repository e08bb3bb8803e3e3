"""Keys, limits at their value and one beyond, deadlines, and a full queue."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from tests.server.conftest import CONNECTIONS
from tests.server.harness import Answer, Server

PATHS = (
    ("GET", "/v1/models"), ("GET", "/ready"), ("GET", "/metrics"), ("GET", "/version"),
    ("GET", "/openapi.json"), ("GET", "/v1/kv/plan"), ("GET", "/nothing"), ("GET", "//v1/models"),
    ("GET", "/v1%2Fmodels"), ("GET", "/health/../v1/models"), ("GET", "/docs"),
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("POST", "/health/"),
)  # fmt: skip


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_nothing_but_health_answers_without_a_key(guarded: Server, method: str, path: str) -> None:
    for headers in (
        {"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"},
        {"Authorization": "", "X-Api-Key": "sesam"}, {"Authorization": "Bearer sesame2"},
        {"Authorization": "", "Host": "x/health?"}, {"Authorization": "Bearer \xff"},
    ):  # fmt: skip
        answer = guarded.send(method, path, {} if method == "POST" else None, headers)
        assert answer.status == 401
        assert answer.error["code"] == "invalid_api_key"


def test_keys_are_taken_both_ways_and_health_needs_none(guarded: Server) -> None:
    none = {"Authorization": ""}
    assert guarded.send("GET", "/health", headers=none).status == 200
    assert (
        guarded.send("GET", "/v1/models", headers={"Authorization": "Bearer sesame"}).status == 200
    )
    assert (
        guarded.send("GET", "/v1/models", headers={"Authorization": "bearer other"}).status == 200
    )
    assert guarded.send("GET", "/v1/models", headers={**none, "X-Api-Key": "sesame"}).status == 200


def test_keys_do_not_share_cached_pages(guarded: Server) -> None:
    prompt = "the same long prompt under two keys, more than a page"

    def cached(key: str) -> int:
        answer = guarded.post(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": 1},
            headers={"Authorization": f"Bearer {key}"},
        )
        count: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached("sesame") == 0
    assert cached("sesame") > 0
    assert cached("other") == 0


def _padded(size: int) -> bytes:
    empty = len(json.dumps({"prompt": "a", "max_tokens": 1, "user": ""}))
    return json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * (size - empty)}).encode()


def test_a_body_may_have_its_limit_and_no_byte_more(guarded: Server) -> None:
    assert guarded.post("/v1/completions", _padded(2000)).status == 200
    answer = guarded.post("/v1/completions", _padded(2001))
    assert answer.status == 413
    assert answer.error["code"] == "body_too_large"


def _raw(server: Server, data: bytes, *, seconds: float = 5.0) -> bytes:
    """Bytes in, everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as sock:
        sock.sendall(data)
        found = b""
        while part := sock.recv(65536):
            found += part
        return found


_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n"


def test_a_chunked_body_is_counted_as_it_comes(guarded: Server) -> None:
    chunk = b"%x\r\n%s\r\n" % (500, b" " * 500)
    head = _HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = _raw(guarded, head + chunk * 6)  # and never an end
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_hundred_headers_pass_and_one_more_does_not(guarded: Server) -> None:
    ours = 2  # Host and Authorization
    for count, expected in ((100 - ours, b"HTTP/1.1 200"), (101 - ours, b"HTTP/1.1 431")):
        extra = b"".join(b"x-%d: 1\r\n" % i for i in range(count - 1)) + b"Connection: close\r\n"
        head = b"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n" + extra
        assert _raw(guarded, head + b"\r\n").startswith(expected)


def test_a_large_header_is_refused(guarded: Server) -> None:
    head = b"GET /version HTTP/1.1\r\nHost: x\r\nX-Large: " + b"x" * 200_000 + b"\r\n\r\n"
    try:
        answer = _raw(guarded, head)
    except ConnectionError:
        return  # closed while we were still sending
    assert answer.split()[1] in (b"400", b"431")


@pytest.mark.parametrize(
    "start", [b"", b"GET /health HT", _HEAD, _HEAD + b"Content-Length: 50\r\n\r\n{"]
)
def test_requests_that_trickle_are_ended(guarded: Server, start: bytes) -> None:
    """One byte every 0.2 s keeps no connection beyond the deadline of one second."""
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=0.2) as sock:
        sock.sendall(start)
        while time.monotonic() - started < 5:
            try:
                if sock.recv(4096) == b"":
                    break
                continue
            except TimeoutError:
                pass
            except ConnectionError:
                break
            try:
                sock.sendall(b"a" if start else b"")
            except ConnectionError:
                break
    assert 0.8 <= time.monotonic() - started < 2.5


def test_a_slow_answer_is_no_slow_request(guarded: Server) -> None:
    """The control: deadlines are for receiving; what takes longer to answer is answered."""
    started = time.monotonic()
    with guarded.open_stream(max_tokens=4000) as response:
        body = response.read()
    assert time.monotonic() - started > 1.2
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"request_timeout" in body, "after --request-timeout an error event ends it"
    guarded.wait_idle(2)


def test_a_full_queue_is_429_with_retry_after(guarded: Server) -> None:
    guarded.wait_idle(5)
    with ExitStack() as running:
        for _ in range(3):  # two run, one waits
            running.enter_context(guarded.open_stream(max_tokens=4000))
        started = time.monotonic()
        answer = guarded.complete("abc")
        took = time.monotonic() - started
    assert answer.status == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.error["code"] == "server_full"
    assert took < 0.5
    guarded.wait_idle(3)
    assert guarded.complete("abc", max_tokens=1).status == 200


def test_a_burst_is_held_to_the_bound_exactly(guarded: Server) -> None:
    guarded.wait_idle(5)
    answers: list[Answer] = []

    def ask() -> None:
        answers.append(guarded.complete("abc", max_tokens=40, ignore_eos=True))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    most = 0.0
    while any(thread.is_alive() for thread in threads):
        names = ("kvant:num_requests_running", "kvant:num_requests_waiting")
        most = max(most, sum(guarded.metric(name) for name in names))
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 429}
    assert most <= 3
    guarded.wait_idle(3)


def test_a_full_server_answers_before_the_body_has_come(guarded: Server) -> None:
    guarded.wait_idle(5)
    head = _HEAD + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    with ExitStack() as running:
        for _ in range(3):
            running.enter_context(guarded.open_stream(max_tokens=4000))
        with socket.create_connection(("127.0.0.1", guarded.port), timeout=0.9) as sock:
            sock.sendall(head)  # and nothing of the body
            assert sock.recv(4096).startswith(b"HTTP/1.1 429")
    guarded.wait_idle(3)


def test_what_the_guard_refuses_is_counted(guarded: Server) -> None:
    def refused() -> float:
        text = guarded.get("/metrics").body.decode()
        found = [x for x in text.splitlines() if 'route="/v1/models",status="401"' in x]
        return float(found[0].split()[-1]) if found else 0.0

    before = refused()
    guarded.send("GET", "/v1/models", headers={"Authorization": ""})
    assert refused() == before + 1


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:8080", True),
        ("https://app.example", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://localhost:3000.evil.example", False),
        ("null", False),
    ],
)
def test_pages_of_this_machine_and_named_origins_are_allowed(
    guarded: Server, origin: str, allowed: bool
) -> None:
    shown = origin if allowed else None
    answer = guarded.send("GET", "/v1/models", headers={"Origin": origin})
    assert answer.headers.get("access-control-allow-origin") == shown
    asked = {
        "Authorization": "", "Origin": origin, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }  # fmt: skip
    preflight = guarded.send("OPTIONS", "/v1/chat/completions", headers=asked)
    assert (preflight.status == 200) == allowed
    assert preflight.headers.get("access-control-allow-origin") == shown
    asked["Access-Control-Request-Method"] = "DELETE"  # of stored responses and sessions
    preflight = guarded.send("OPTIONS", "/v1/responses/resp_1", headers=asked)
    assert (preflight.status == 200) == allowed
    plain = guarded.send("OPTIONS", "/v1/models", headers={"Authorization": ""})
    assert plain.status == 401, "only a preflight request needs no key"


def test_the_header_block_may_have_its_limit_and_no_byte_more(guarded: Server) -> None:
    ours = {b"Host": b"x", b"Authorization": b"Bearer sesame", b"Connection": b"close"}
    size = sum(len(name) + len(value) + 4 for name, value in ours.items()) + len(b"X-Pad") + 4
    for padding, expected in ((2**15 - size, b"HTTP/1.1 200"), (2**15 - size + 1, b"HTTP/1.1 431")):
        lines = {**ours, b"X-Pad": b"x" * padding}
        block = b"".join(b"%s: %s\r\n" % line for line in lines.items())
        assert _raw(guarded, b"GET /version HTTP/1.1\r\n" + block + b"\r\n").startswith(expected)


def test_as_many_connections_as_allowed_and_no_one_more(guarded: Server) -> None:
    time.sleep(0.2)  # those of other tests have been closed
    with ExitStack() as opened:
        for _ in range(CONNECTIONS):
            address = ("127.0.0.1", guarded.port)
            sock = opened.enter_context(socket.create_connection(address, timeout=5))
        sock.sendall(_HEALTH)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200"), "the last one is served"
        head, body = _raw(guarded, b"").split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
    time.sleep(0.2)
    assert guarded.get("/health").status == 200, "places of closed connections come back"


def test_a_connection_may_rest_for_its_time_and_no_longer(guarded: Server) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=5) as sock:
        for rest in (0.0, 0.7):
            time.sleep(rest)
            sock.sendall(_HEALTH)
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        assert sock.recv(4096) == b""
        assert 0.9 <= time.monotonic() - started < 2


def test_a_silent_stream_shows_signs_of_life(guarded: Server) -> None:
    guarded.wait_idle(5)
    with guarded.open_stream(max_tokens=4000) as response:
        engine = guarded.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            lines = [response.readline()]
            while lines[-1] != b": ping\n":
                lines.append(response.readline())
                assert len(lines) < 20_000
        finally:
            os.kill(engine, signal.SIGCONT)
        assert response.readline() == b"\n"
        assert response.readline().startswith((b"data: ", b": ping")), "and then it goes on"
    guarded.wait_idle(3)


def test_prompts_wait_up_to_the_limit_of_tokens(strict: Server) -> None:
    with ExitStack() as running:
        running.enter_context(strict.open_stream(max_tokens=4000))
        while not strict.metric("kvant:num_requests_running"):
            time.sleep(0.01)
        while strict.metric("kvant:queued_prompt_tokens"):
            time.sleep(0.01)
        running.enter_context(strict.ask_for_stream(prompt=[5] * 60, max_tokens=9))
        while not strict.metric("kvant:queued_prompt_tokens"):
            time.sleep(0.01)
        refused = strict.complete([5] * 41, max_tokens=1)
        assert refused.status == 429
        assert "60 tokens wait" in refused.error["message"]
        running.enter_context(strict.ask_for_stream(prompt=[5] * 40, max_tokens=9))
        while strict.metric("kvant:queued_prompt_tokens") != 100:
            time.sleep(0.01)
        assert strict.complete([5], max_tokens=1).status == 429
    strict.wait_idle(5)


def test_what_is_no_http_is_refused_in_the_common_shape(guarded: Server) -> None:
    for garbage in (b"\x16\x03\x01\r\n\r\n", b"GET / XTTP/1.1\r\n\r\n", b"GET\r\n\r\n"):
        answer = _raw(guarded, garbage)
        head, body = answer.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "bad_http"


def test_more_sequences_than_the_server_can_ever_hold_are_no_matter_of_waiting(
    guarded: Server,
) -> None:
    assert guarded.complete("abc", n=3, max_tokens=1).status == 200
    answer = guarded.complete("abc", n=4, max_tokens=1)
    assert answer.status == 400
