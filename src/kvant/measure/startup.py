"""How long a start takes: from the creation of a process to the first token, and where the time goes.

`kvant chat` itself is started, asked one question and watched until the first text of its answer; the
parts come from processes that do the same in Python and note the time after each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise

from kvant.errors import EngineFault

QUESTION = "What is the sea?"
_GREETED = b"/help lists commands."
_CHAT = (sys.executable, "-c", "from kvant.cli.main import run; run()", "chat")
_FLAGS = ("--max-tokens", "2", "--temperature", "0")
_PARTS = (sys.executable, "-m", "kvant.measure.startup")


@dataclass(frozen=True, slots=True)
class Start:
    """cache: whether models and compiled kernels were there. seconds: until the first token of `kvant chat`.

    parts: seconds by name, of another process in the same circumstances; none for a first start, which
    only one process can be.
    """

    cache: str
    seconds: float
    parts: Mapping[str, float]


def measure_starts(repeats: int, *, first: bool) -> Iterator[Start]:
    """Starts of the demo model. first: begin with one in an empty cache, and go on in that one."""
    with tempfile.TemporaryDirectory(prefix="kvant-startup-") as empty:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        if first:
            environment["KVANT_CACHE"] = empty
            yield Start("empty", _until_first_text(environment), {})
        else:
            _until_first_text(environment)
        for _ in range(repeats):
            yield Start("filled", _until_first_text(environment), _parts(environment))


def table(starts: list[Start]) -> str:
    """As Markdown: every start, and the medians of the parts."""
    lines = ["| cache | first token of `kvant chat` after |", "| --- | ---: |"]
    lines += [f"| {start.cache} | {start.seconds:.2f} s |" for start in starts]
    with_parts = [start.parts for start in starts if start.parts]
    lines += ["", "| part, with a filled cache | s |", "| --- | ---: |"]
    for name in with_parts[0] if with_parts else ():
        median = statistics.median(parts[name] for parts in with_parts)
        lines.append(f"| {name} | {median:.2f} |")
    return "\n".join(lines)


def _until_first_text(environment: Mapping[str, str]) -> float:
    """Seconds from the start of `kvant chat` to the first text after its greeting."""
    started = time.perf_counter()
    chat = subprocess.Popen(
        (*_CHAT, *_FLAGS),
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


def _parts(environment: Mapping[str, str]) -> dict[str, float]:
    command = [*_PARTS, repr(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    if done.returncode != 0:
        raise EngineFault(f"a start failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _note_parts(created: float) -> dict[str, float]:
    """What `kvant chat` does, in this process, with the seconds of each part. created: when it was."""
    marks = [("", created)]

    def mark(name: str) -> None:
        marks.append((name, time.monotonic()))

    mark("Python")
    import_module("kvant.cli.main")
    from kvant.engine.build import plan_engine
    from kvant.engine.llm import LLM
    from kvant.plan.llm_options import config_of
    from kvant.sampling.sampling_params import SamplingParams

    mark("command line")
    config = config_of(None, {"max_num_seqs": 1})
    plan_engine(config)
    mark("finding the model, planning")
    import_module("torch")
    mark("import torch")
    import_module("kvant.models.load")
    import_module("kvant.execution.runner")
    mark("import transformers and the engine")
    llm = LLM.from_config(config)
    mark("tokenizer, weights, kernels")
    prompt = llm.encode_chat([{"role": "user", "content": QUESTION}])
    next(iter(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=2))))
    mark("first token")
    return {name: after - before for (_, before), (name, after) in pairwise(marks)}


if __name__ == "__main__":
    print(json.dumps(_note_parts(float(sys.argv[1]))))
