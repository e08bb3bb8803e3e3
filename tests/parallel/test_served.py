"""`kvant serve` and `kvant generate` with two ranks, in processes as users start them."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvant.cli.generate import generate
from tests.server.harness import Server, build_model, events

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("real_processes")]
FLAGS = ("-tp", "2", "--device", "cpu", "--max-num-seqs", "4")
SECONDS = 60.0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the server's processes make directories for ranks to meet in."""
    where = tmp_path / "temporary"
    where.mkdir()
    monkeypatch.setenv("TMPDIR", str(where))
    tempfile.tempdir = None  # looked up again
    yield where
    tempfile.tempdir = None


def _until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.05)


def _meetings(temporary: Path) -> list[Path]:
    return list(temporary.glob("kvant-ranks-*"))


def _rank_pids(engine: int) -> list[int]:
    """Processes of ranks that an engine started."""
    children = Path(f"/proc/{engine}/task")
    found: list[int] = []
    for task in children.iterdir():
        found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_costs_its_requests_an_error_and_the_engine_comes_back(
    sent: signal.Signals, tmp_path: Path, temporary: Path
) -> None:
    model = build_model(tmp_path)
    with Server(model) as one:
        golden = one.complete("xyz", max_tokens=8).json["choices"]
    with Server(model, FLAGS) as server:
        assert server.complete("xyz", max_tokens=8).json["choices"] == golden
        engine = server.engine_pid()
        (rank,) = _rank_pids(engine)
        bodies: list[bytes] = []

        def read() -> None:
            with server.open_stream(max_tokens=4000, ignore_eos=True) as response:
                bodies.append(response.read())

        reader = threading.Thread(target=read)
        reader.start()
        _until(lambda: server.metric("kvant:num_requests_running") == 1)
        lost = time.monotonic()
        os.kill(rank, sent)
        reader.join(SECONDS)
        assert server.get("/health").status == 503
        assert time.monotonic() - lost < 15  # 10 s on a machine that does nothing else
        assert "error" in events(bodies[0])[-1]
        _until(lambda: server.get("/ready").status == 200)
        assert server.engine_pid() != engine
        assert server.complete("xyz", max_tokens=8).json["choices"] == golden
        assert not Path(f"/proc/{rank}").exists()
        assert len(_meetings(temporary)) == 1, "the new ranks' directory alone is left"


def test_ranks_end_with_a_killed_engine(tmp_path: Path, temporary: Path) -> None:
    with Server(build_model(tmp_path), (*FLAGS, "--no-restart")) as server:
        engine = server.engine_pid()
        (rank,) = _rank_pids(engine)
        assert len(_meetings(temporary)) == 1
        os.kill(engine, signal.SIGKILL)
        _until(lambda: not Path(f"/proc/{rank}").exists(), 10)
        assert _meetings(temporary) == []


def test_generate_prints_what_one_device_prints(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    outputs = []
    app = typer.Typer()
    app.command()(generate)
    for size in ("1", "2"):
        ran = CliRunner().invoke(
            app, ["--model", str(model), "Hello", "-tp", size, "--device", "cpu",
            "--temperature", "0", "--max-tokens", "12", "--kv-cache-memory", "2MiB"],
        )  # fmt: skip
        assert ran.exit_code == 0, ran.output
        outputs.append(ran.stdout)
    assert outputs[0] == outputs[1]
