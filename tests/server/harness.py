"""A real `kvant serve` in its own process, on loopback, on a free port."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import forked
from tests.engine import tiny_chat

START_SECONDS = 90.0
MODEL_LEN = 4096
RUN = "from kvant.cli.main import run; run()"
COMMAND = (sys.executable, "-c", RUN, "serve")
FORKED = ("-c", f"from tests.server.forked_children import fork; fork(); {RUN}", "serve")


def build_model(directory: Path, *, fills: bool = False) -> Path:
    """A tiny random model whose answers can be long. fills: with tokens to fill in the middle."""
    return tiny_chat.build(directory, fills=fills, max_position_embeddings=MODEL_LEN)


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The inner error; fails unless the body is OpenAI's shape, all four keys."""
        body = self.json
        assert set(body) == {"error"}
        error: dict[str, Any] = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert "Traceback" not in error["message"]
        return error


@dataclass
class Server:
    """Started on entry, killed on exit if it still runs.

    is_real: it and its children are started as a user's are. Else they are forked, which takes no seconds.
    """

    model: Path
    flags: tuple[str, ...] = ()
    key: str | None = None
    is_real: bool = False
    port: int = 0
    output: list[str] = field(default_factory=list)
    start_seconds: float = START_SECONDS

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def start(self) -> None:
        flags = (str(self.model), "--port", "0", "--kv-cache-memory", "4MiB", *self.flags)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process: subprocess.Popen[str] | forked.Forked
        if self.is_real:
            self.process = subprocess.Popen(
                [*COMMAND, *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
            )
        else:
            self.process = forked.popen_piped([*FORKED, *flags], env)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        ended = time.monotonic() + self.start_seconds
        while time.monotonic() < ended:
            for line in self.output:
                if found := re.search(r"ready: .* on http://127\.0\.0\.1:(\d+)", line):
                    self.port = int(found[1])
                    return
            assert self.process.poll() is None, "".join(self.output)
            time.sleep(0.02)
        raise AssertionError("not ready in time:\n" + "".join(self.output))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)

    # -- requests ------------------------------------------------------------------------------

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One request on a connection of its own. body: bytes as they are, anything else as JSON."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            sent = {"Content-Type": "application/json", **self.headers(), **(headers or {})}
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.send("GET", path)

    def post(self, path: str, body: object, **more: Any) -> Answer:
        return self.send("POST", path, body, **more)

    def complete(self, prompt: object = "abc", **more: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **more})

    @contextmanager
    def ask_for_stream(self, **more: Any) -> Iterator[http.client.HTTPConnection]:
        """A stream that was asked for; its head comes with its first token."""
        connection = self.connect()
        body = {"prompt": "abc", "stream": True, "temperature": 0, "ignore_eos": True, **more}
        sent = {"Content-Type": "application/json", **self.headers()}
        connection.request("POST", "/v1/completions", json.dumps(body), sent)
        try:
            yield connection
        finally:
            connection.close()

    @contextmanager
    def open_stream(self, **more: Any) -> Iterator[http.client.HTTPResponse]:
        """A stream whose head has arrived; leaving closes the connection, read or not."""
        with self.ask_for_stream(**more) as connection:
            response = connection.getresponse()
            try:
                assert response.status == 200
                yield response
            finally:
                response.close()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over all labels."""
        text = self.get("/metrics").body.decode()
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not among the metrics"
        return sum(map(float, found))

    def wait_idle(self, seconds: float) -> float:
        """Until nothing runs, waits or holds pages; how long that took."""
        started = time.monotonic()
        names = ("kvant:num_requests_running", "kvant:num_requests_waiting", "kvant:pages_held")
        while time.monotonic() - started < seconds:
            if not any(self.metric(name) for name in names):
                return time.monotonic() - started
            time.sleep(0.01)
        raise AssertionError(f"not idle after {seconds} s")

    def engine_pid(self) -> int:
        return self.child("engine_process")

    def child(self, name: str) -> int:
        """The process of `kvant.server.NAME`."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        places = [Path(f"/proc/{pid}") for pid in children.split()]
        found = [
            int(place.name)
            for place in places
            if f"kvant.server.{name}" in (place / "cmdline").read_text().split("\0")
            or name == (place / "comm").read_text().strip()
        ]
        assert len(found) == 1
        return found[0]


def events(body: bytes) -> list[Any]:
    """The events of a whole stream; the last one must be [DONE]."""
    lines = [line for line in body.decode().split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
