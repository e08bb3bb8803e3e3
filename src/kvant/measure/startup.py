"""Measure a start from the creation of a process to the first token, and its parts.

This starts `kvant chat`, asks one question and waits for the first text of its answer. The parts come from
processes that do the same in Python and record the time after each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvant.errors import EngineFault

QUESTION = "What is the sea?"
_GREETED = b"/help lists commands."
_FLAGS = ("--max-tokens", "2", "--temperature", "0")


@dataclass(frozen=True, slots=True)
class Start:
    """One start. cache: models and compiled kernels were cached. seconds: until `kvant chat`'s first token.

    parts: seconds by name, from another process in the same state; empty for a first start, which
    only one process can make.
    """

    cache: str
    seconds: float
    parts: Mapping[str, float]


def measure_starts(
    chat: Sequence[str], parts: Sequence[str], repeats: int, *, first: bool
) -> Iterator[Start]:
    """Starts the demo model. first: begin with an empty cache, and use that cache from then on.

    chat: the command `kvant chat`, to which flags can be added. parts: a command that takes the time of its
    own creation (`time.monotonic`) and prints a JSON object, seconds by part, as its last line.
    """
    with tempfile.TemporaryDirectory(prefix="kvant-startup-") as empty:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if first:
            environment["KVANT_CACHE"] = empty
            yield Start("empty", until_first_text(chat, environment), {})
        else:
            until_first_text(chat, environment)
        for _ in range(repeats):
            seconds = until_first_text(chat, environment)
            yield Start("filled", seconds, _parts(parts, environment))


def table(starts: list[Start]) -> str:
    """Formats every start, and the medians of the parts, as Markdown."""
    lines = ["| cache | first token of `kvant chat` after |", "| --- | ---: |"]
    lines += [f"| {start.cache} | {start.seconds:.2f} s |" for start in starts]
    with_parts = [start.parts for start in starts if start.parts]
    lines += ["", "| part, with a filled cache | s |", "| --- | ---: |"]
    for name in with_parts[0] if with_parts else ():
        median = statistics.median(parts[name] for parts in with_parts)
        lines.append(f"| {name} | {median:.2f} |")
    return "\n".join(lines)


def until_first_text(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Returns seconds from the start of `kvant chat` to the first text after its greeting."""
    started = time.perf_counter()
    chat = subprocess.Popen(
        (*command, *_FLAGS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    assert chat.stderr is not None
    with chat:
        chat.stdin.write(f"{QUESTION}\n".encode())
        chat.stdin.close()
        said = b""
        while piece := os.read(chat.stdout.fileno(), 1 << 16):
            said += piece
            _, greeted, answer = said.partition(_GREETED)
            if greeted and answer.strip():
                seconds = time.perf_counter() - started
                chat.stdout.read()
                return seconds
        raise EngineFault(f"kvant chat gave no answer: {chat.stderr.read().decode()[-2000:]}")


def _parts(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    whole = [*command, repr(time.monotonic())]
    done = subprocess.run(whole, capture_output=True, text=True, env=dict(environment))
    if done.returncode != 0:
        raise EngineFault(f"a start failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
