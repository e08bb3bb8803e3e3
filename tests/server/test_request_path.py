"""How many files a reader opens to follow one HTTP request from its socket to its tokens."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.server.harness import Server

ROOMS = ("server", "engine", "sampling", "scheduling", "execution")
MOST_FILES = 22
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def tell(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)


def test_a_chat_request_passes_few_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = str(Path(__file__).parent / "recorded")
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (recorder, before))))
    monkeypatch.setenv("RECORDED_FILES", str(tmp_path))
    with Server(model, is_real=True) as server:  # it starts with the recorder
        assert server.post("/v1/chat/completions", BODY).status == 200
        processes = [server.process.pid, *children(server.process.pid)]
        assert len(processes) == 3, "the server, its engine and its chat templates"
        tell(processes, signal.SIGUSR1)
        assert server.post("/v1/chat/completions", BODY).status == 200
        tell(processes, signal.SIGUSR2)
        ended = time.monotonic() + 10
        while len(list(tmp_path.iterdir())) < len(processes) and time.monotonic() < ended:
            time.sleep(0.05)
        time.sleep(0.2)
    found = {path for one in tmp_path.iterdir() for path in json.loads(one.read_text())}
    passed = sorted(path for path in found if path.partition("/")[0] in ROOMS)
    print("\n".join(passed))
    assert {"server/app.py", "server/engine_process.py", "engine/engine.py"} <= set(passed)
    assert len(passed) <= MOST_FILES
