"""Hostile schemas, regexes and grammars are refused or answered in time, and other requests do not wait."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from tests.server.harness import Server

# Other tests and stages share the cores: a stream waited 0.33 s beside them, and 0.02 s alone.
ANSWER_SECONDS, STREAM_GAP_SECONDS, GROWN = 6.0, 1.0, 0.10


def _nested(levels: int) -> str:
    """As text: json.dumps gives up at a thousand levels."""
    return '{"type":"object","properties":{"a":' * levels + "{}" + "}}" * levels


def _json(schema: object) -> str:
    return json.dumps(schema)


SCHEMAS: dict[str, str] = {
    "200 levels": _nested(200),
    "2000 levels": _nested(2000),
    "5000 properties": _json({"properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}),
    "600 properties": _json({"properties": {f"p{i}": {"type": "integer"} for i in range(600)}}),
    "enum of 50,000": _json({"enum": [f"v{i}" for i in range(50_000)]}),
    "a million characters": _json({"type": "string", "maxLength": 10**6}),
    "a million items": _json({"type": "array", "minItems": 10**6, "items": {}}),
    "recursion": _json({"properties": {"c": {"type": "array", "items": {"$ref": "#"}}}}),
    "recursion without end": _json({"$ref": "#"}),
    "unknown type": _json({"type": "objekt"}),
    "pattern that is none": _json({"type": "string", "pattern": "("}),
    "empty": "{}",
}
REGEXES = {
    "30,000 parentheses": "(" * 30_000 + ")" * 30_000,
    "a million times": "(a{1,1000}){1,1000}",
    "two to the 200": "(a|b)*a(a|b){200}",
    "nested stars": "((a*)*)*",
}
GRAMMARS = {"left recursion": 'start: start "a" | "b"', "cycle": "start: x\nx: start"}


def _bodies() -> dict[str, bytes]:
    def body(field: str, value: str) -> bytes:
        return f'{{"prompt":"abc","max_tokens":4,"{field}":{value}}}'.encode()

    return {
        **{name: body("guided_json", schema) for name, schema in SCHEMAS.items()},
        **{name: body("guided_regex", _json(regex)) for name, regex in REGEXES.items()},
        **{name: body("guided_grammar", _json(grammar)) for name, grammar in GRAMMARS.items()},
    }


def _resident(pid: int) -> int:
    """Bytes of a process and all below it."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return pages * os.sysconf("SC_PAGESIZE") + sum(_resident(int(child)) for child in children)


class Reader:
    """A stream that is read beside everything else, and how long it ever stood still."""

    def __init__(self, server: Server) -> None:
        self.longest = 0.0
        self._server, self._ended = server, threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def stop(self) -> float:
        self._ended.set()
        self._thread.join()
        return self.longest

    def _read(self) -> None:
        while not self._ended.is_set():
            with self._server.open_stream(max_tokens=4000) as response:
                last = time.monotonic()
                while response.readline() and not self._ended.is_set():
                    now = time.monotonic()
                    self.longest, last = max(self.longest, now - last), now


def test_every_bomb_is_answered_in_time_and_leaves_nothing_behind(server: Server) -> None:
    bodies = _bodies()
    assert len(bodies) >= 14
    good = {"prompt": "abc", "max_tokens": 8, "guided_regex": "[a-z]{4}"}
    before_answer = server.post("/v1/completions", {**good, "temperature": 0}).json["choices"]
    before, engine = _resident(server.process.pid), server.engine_pid()
    seconds: dict[str, float] = {}
    statuses: dict[str, Any] = {}
    reader = Reader(server)
    for name, body in bodies.items():
        started = time.monotonic()
        answer = server.post("/v1/completions", body)
        seconds[name], statuses[name] = time.monotonic() - started, answer.status
        if answer.status == 400:
            assert isinstance(answer.error["message"], str)
    gap = reader.stop()
    server.wait_idle(5)
    grown = _resident(server.process.pid) / before - 1
    slowest = max(seconds, key=lambda name: seconds[name])
    print(
        f"{len(bodies)} bombs: slowest {slowest!r} {seconds[slowest]:.1f} s, longest gap of a stream "
        f"beside them {gap * 1000:.0f} ms, memory {grown:+.1%}; {statuses}"
    )
    assert set(statuses.values()) <= {200, 400}
    assert seconds[slowest] < ANSWER_SECONDS
    assert gap < STREAM_GAP_SECONDS
    assert grown < GROWN
    assert server.engine_pid() == engine
    after = server.post("/v1/completions", {**good, "temperature": 0}).json["choices"]
    assert after == before_answer
