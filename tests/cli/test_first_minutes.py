"""What a user sees first: phases of a start within a second, whole words, snippets that run."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from kvant.cli.chat import Words
from kvant.cli.progress import WorkLines, bars, tracked, work
from kvant.engine.llm import LLM
from kvant.server.messages import Loading
from kvant.server.serve import _LoadingLog
from tests import forked
from tests.engine import tiny_chat

ROOT = Path(__file__).resolve().parents[2]
RUN = "from kvant.cli.main import run; run()"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("first"), max_position_embeddings=256)


@given(st.text("ab \n", max_size=60), st.integers(3, 12), st.integers(1, 7))
@example("aaaaaaaaa aaaaaaa", 3, 3)  # the end of a long word once began a line
def test_words_are_whole_and_nothing_is_lost(text: str, width: int, cut: int) -> None:
    shown: list[str] = []
    words = Words(shown.append, width)
    for place in range(0, len(text), cut):
        words.push(text[place : place + cut])
    words.finish()
    whole = "".join(shown)
    assert whole.split() == text.split()
    for line in whole.split("\n"):
        if all(len(word) < width for word in text.split()):
            assert len(line.rstrip()) <= width


def test_pieces_are_shown_as_they_come_in_a_pipe() -> None:
    shown: list[str] = []
    words = Words(shown.append, None)
    for piece in ("Hel", "lo wor", "ld"):
        words.push(piece)
    assert shown == ["Hel", "lo wor", "ld"]


def test_a_terminal_shows_one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []

    @contextmanager
    def live(shown: Any, **_: Any) -> Iterator[None]:
        rows.append(shown)
        yield

    monkeypatch.setattr("kvant.cli.progress.Live", live)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)

    def lines() -> list[str]:
        with console.capture() as capture:
            console.print(rows[0])
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capture.get())
        return [line for line in text.splitlines() if line.strip()]

    with bars(console) as progress:
        for report, word in (
            (("planning", 0, 0), "planning"),
            (("converting", 0, 100), "converting"),
            (("converting", 60, 100), "60/100"),
            (("converting", 100, 100), "planning"),
            (("loading weights", 0, 0), "loading weights"),
            (("loading weights", 5, 10, "rows"), "5/10"),
            (("recording steps", 0, 0), "5/10"),  # another thread still loads
            (("loading weights", 10, 10, "rows"), "recording steps"),
        ):
            progress(*report)
            (row,) = lines()
            assert word in row


def test_a_start_tells_its_phases_in_order(path: Path) -> None:
    done = forked.run(["-c", RUN, "generate", "-m", str(path), "--max-tokens", "1", "hello"])
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("kvant: ")]
    phases = [line.removeprefix("kvant: ") for line in told]
    assert phases[0] == "planning"
    assert phases.index("verifying kernels") < phases.index("loading weights")
    assert "kvant: " not in done.stdout


def test_loading_tells_how_much_of_the_weights_is_there(path: Path) -> None:
    told: list[tuple[int, int]] = []

    def progress(task: str, done: int, total: int, unit: str = "bytes") -> None:
        if task == "loading weights":
            told.append((done, total))

    llm = LLM(path, kv_cache_memory="1MiB", progress=progress)
    assert told[0] == (0, 0), "a phase begins"
    shares = [done for done, _ in told[1:]]
    assert shares == sorted(shares)
    assert {total for _, total in told[1:]} == {llm.planned.memory.weights_bytes}
    assert shares[-1] == llm.planned.memory.weights_bytes
    assert len(shares) > 10


def test_a_server_says_at_once_that_it_starts_and_health_says_what_it_does(path: Path) -> None:
    command = (sys.executable, "-c", RUN, "serve", str(path), "--port", "0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"kvant: starting {path}\n"
        seen = [process.stdout.readline()]
        while "ready" not in seen[-1]:
            seen.append(process.stdout.readline())
        assert "kvant: loading weights\n" in seen
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_health_names_the_phase_of_a_start(path: Path, unused_port: int) -> None:
    command = (sys.executable, "-c", RUN, "serve", str(path), "--port", str(unused_port))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        phases, status, ended = set(), "", time.monotonic() + 90
        while status != "ready":
            assert time.monotonic() < ended
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{unused_port}/health") as found:
                    answer = json.load(found)
            except urllib.error.HTTPError as fault:
                answer = json.load(fault)
            except urllib.error.URLError:
                time.sleep(0.02)
                continue
            status = answer["status"]
            phases.add(answer.get("phase"))
            time.sleep(0.02)
        assert "importing torch and transformers" in phases
        assert "phase" not in answer
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_the_snippet_of_asyncllm_runs_as_printed(path: Path) -> None:
    page = (ROOT / "docs" / "usage.md").read_text()
    (snippet,) = [
        one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Async" in one
    ]
    assert "temperature=0" in snippet, "an example gives the same text each time"
    done = forked.run(["-c", snippet.replace('"smollm2"', repr(str(path)))])
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_work_is_one_bar_that_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with work("measuring", "rows") as told:
        told(1, 2)
    assert capsys.readouterr().err == "", "no terminal"


def test_work_shows_what_is_done_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr("kvant.cli.progress.Console", lambda **_: terminal)
    seen = list(tracked("ab", 2, "measuring", "rows"))
    text = screen.getvalue()
    assert seen == ["a", "b"]
    assert "measuring" in text
    assert "2/2" in text
    assert "rows" in text
    assert "0:00:00" in text


def test_without_a_terminal_long_work_is_a_line_every_30_seconds() -> None:
    said: list[str] = []
    clock = iter((0.0, 0.0, 10.0, 31.0, 40.0, 62.0, 70.0, 99.0))
    lines = WorkLines("measuring", "tokens", said.append, lambda: next(clock))
    for done in (0, 1000, 3100, 4000, 6200):
        lines(done, 12400)
    lines(0, 10)  # a new stage begins
    lines(1, 10)
    assert said == [
        "kvant: measuring: 3,100 of 12,400 tokens, 93 s left\n",
        "kvant: measuring: 6,200 of 12,400 tokens, 62 s left\n",
        "kvant: measuring: 1 of 10 tokens, 261 s left\n",
    ]


def test_a_server_tells_shares_of_long_tasks_and_the_time_left() -> None:
    said: list[str] = []
    clock = iter((0.0, 0.0, 5.0, 10.0, 12.0, 30.0, 31.0, 32.0))
    log = _LoadingLog(said.append, lambda: next(clock))
    for done in (0, 10, 20, 24, 60):
        log(Loading("Fetching m", done, 100, "bytes"))
    log(Loading("verifying kernels", 0, 0, "bytes"))
    log(Loading("recording steps", 1, 50, "steps"))
    assert said == [
        "kvant: Fetching m (100 B)", "kvant: Fetching m: 20%, 40 s left", "kvant: Fetching m: 60%, 20 s left",
        "kvant: verifying kernels", "kvant: recording steps (50 steps)",
    ]  # fmt: skip


def test_the_time_left_of_a_second_start_counts_from_that_start() -> None:
    said: list[str] = []
    clock = iter((0.0, 0.0, 1.0, 1000.0, 1010.0))
    log = _LoadingLog(said.append, lambda: next(clock))
    log(Loading("loading weights", 0, 100, "bytes"))
    log(Loading("recording steps", 1, 50, "steps"))
    log(Loading("loading weights", 0, 100, "bytes"))
    log(Loading("loading weights", 50, 100, "bytes"))
    assert said[2:] == ["kvant: loading weights: 50%, 10 s left"]
