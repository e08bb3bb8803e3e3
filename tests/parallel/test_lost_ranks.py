"""A rank that dies or hangs ends what runs, soon and with a reason; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from kvant import AsyncLLM, SamplingParams
from kvant.engine.engine import Engine
from kvant.errors import EngineFault, RankLost
from kvant.kv.pool import KVPool
from kvant.kv.saturation import Saturated
from kvant.parallel import ranks, team
from kvant.parallel.runner import RankedRunner
from kvant.parallel.watched import WatchedMark
from tests import forked
from tests.models import tiny
from tests.parallel.test_equality import make

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SECONDS = 10.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""The bound of a machine with a core for each process; more where other work shares the cores."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("sent", "says"), [(signal.SIGKILL, "was killed by SIGKILL|ended"), (signal.SIGSTOP, "hangs")]
)
def test_a_lost_rank_ends_running_requests(
    path: Path, sent: signal.Signals, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "SILENT_SECONDS", 4.0)
    llm = make(path, 2)
    runner = llm.engine.runner
    assert isinstance(runner, RankedRunner)
    (pid,) = runner.ranks.pids
    llm.engine.submit([5, 6, 7], LONG)
    for _ in range(3):
        llm.engine.step()
    os.kill(pid, sent)
    started = time.monotonic()
    with pytest.raises(RankLost, match=says):
        _run(llm.engine)
    assert time.monotonic() - started < SECONDS
    llm.engine.submit([5, 6, 7], LONG)
    with pytest.raises(RankLost):
        llm.engine.step()
    _wait_for_the_end(pid)


def test_a_rank_that_cannot_count_saturated_values_ends_the_engine(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "spawn", lambda *given: forked._start(_rank_without_counts, *given))
    llm = make(path, 2)
    runner = llm.engine.runner
    assert isinstance(runner, RankedRunner)
    (pid,) = runner.ranks.pids
    llm.engine.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=2))
    with pytest.raises(RankLost, match=r"rank 1 failed: .*no counts"):
        _run(llm.engine)
    _wait_for_the_end(pid)


def test_an_async_requester_is_told(path: Path) -> None:
    async def ask() -> None:
        llm = await asyncio.to_thread(
            AsyncLLM, path, tensor_parallel_size=2, device="cpu", kv_cache_memory="2MiB"
        )
        (pid,) = llm._worker._driver.engine.runner.ranks.pids  # type: ignore[attr-defined]
        stream = llm.generate([5, 6, 7], LONG)
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineFault, match="rank 1"):
            async for _ in stream:
                pass

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_a_rank_with_another_plan_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "plan_fingerprint", lambda _: "forged")
    with pytest.raises(RankLost, match=r"rank 1 failed: .*made another plan"):
        make(path, 2)


def test_ranks_end_with_their_engine(path: Path) -> None:
    llm = make(path, 2)
    runner = llm.engine.runner
    assert isinstance(runner, RankedRunner)
    (pid,), directory = runner.ranks.pids, runner.ranks.directory
    assert _lives(pid)
    runner.ranks.close()
    assert not _lives(pid)
    assert not directory.exists()


@pytest.mark.slow
@pytest.mark.usefixtures("real_processes")
def test_real_processes_answer_and_end(path: Path) -> None:
    llm = make(path, 2)
    runner = llm.engine.runner
    assert isinstance(runner, RankedRunner)
    (pid,) = runner.ranks.pids
    assert len(llm.generate([[3, 4, 5]], LONG)[0].token_ids) == 400
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankLost, match="SIGKILL"):
        llm.generate([[3, 4, 5]], LONG)


def _rank_without_counts(link: socket.socket, pulse: socket.socket) -> None:
    """A rank whose device fails after a step, so that its counts cannot be read."""

    def read() -> tuple[Saturated, ...]:
        raise RuntimeError("no counts")

    KVPool.count_saturated = lambda _: read  # type: ignore[method-assign]
    forked._rank(link, pulse)


def _run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _wait_for_the_end(pid: int) -> None:
    until = time.monotonic() + SECONDS
    while _lives(pid):
        assert time.monotonic() < until, "the process is left behind"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    """Whether the process runs; one that ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return False
    return state != "Z"


class _Never:
    """An event behind a kernel that waits for a lost rank."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("nap", [0.0, 1e-4])
def test_rank_0_does_not_sleep_while_it_waits(nap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that slept runs slower for a while, and even a sleep of 0 s takes 50 us."""
    slept: list[float] = []
    monkeypatch.setattr("kvant.parallel.watched.time.sleep", slept.append)

    class Third(_Never):
        asked = 0

        def query(self) -> bool:
            self.asked += 1
            return self.asked == 3

    WatchedMark(Third(), lambda: None, nap).synchronize()  # type: ignore[arg-type]
    assert slept == ([nap, nap] if nap else [])


def test_waiting_for_a_kernel_that_never_ends_ends_with_the_rank() -> None:
    asked = []

    def check() -> None:
        asked.append(time.monotonic())
        if len(asked) > 3:
            raise RankLost("rank 1 was killed")

    with pytest.raises(RankLost, match="rank 1 was killed"):
        WatchedMark(_Never(), check, 0.0).synchronize()  # type: ignore[arg-type]
