"""The demo's server: `kvant serve` in a separate process, and two clients that ask about one text."""

from __future__ import annotations

import http.client
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvant.errors import EngineFault

START_SECONDS = 120.0
_READY = re.compile(r"kvant: ready: .* on http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, slots=True)
class Answered:
    """One client's answer. first: seconds until the first text. The token counts come from its usage."""

    text: str
    first: float
    prompt_tokens: int
    cached_tokens: int


@contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[int]:
    """Runs a server on a free port and yields the port. The server ends with the context."""
    code = "from kvant.cli.main import run; run()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, "serve", model, "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield _wait_ready(process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _wait_ready(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        if found := _READY.search(line):
            return int(found[1])
        said.append(line)
    raise EngineFault("the server did not start:\n" + "".join(said))


def client_name() -> str:
    """Returns the client's name: openai-python if it is installed, since Kvant does not depend on it."""
    return "openai-python" if importlib.util.find_spec("openai") else "Python's http.client"


def ask(port: int, model: str, messages: list[dict[str, str]], *, max_tokens: int) -> Answered:
    """Requests one streamed answer, through openai-python if it is installed."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first, text = 0.0, ""
    usage: dict[str, Any] = {}
    chunks = _openai(port, body) if client_name() == "openai-python" else _plain(port, body)
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            if content := choice["delta"].get("content"):
                first = first or time.perf_counter() - started
                text += content
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answered(text, first, usage["prompt_tokens"], cached)


def _openai(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import openai

    url = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for chunk in client.chat.completions.create(**body):
            yield chunk.model_dump()


def _plain(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
    try:
        sent = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), sent)
        response = connection.getresponse()
        if response.status != 200:
            raise EngineFault(f"the demo's server refused: {response.read().decode()}")
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data.startswith("{"):
                yield json.loads(data)
    finally:
        connection.close()
