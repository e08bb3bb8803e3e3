"""`python -m benchmarks.rank_host`: the host's part of a step, with and without other ranks."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.command import run_command
from kvant.cli.configured import configured
from kvant.cli.output import OutFile, write_json
from kvant.plan.config import EngineOptions, engine_config
from kvant.plan.settings import Settings

if TYPE_CHECKING:
    from kvant.engine.engine import Engine

SIZES = (32, 256)
PROMPT_TOKENS = 128


@configured(EngineOptions, model="--model -m", without=("seed",))
def rank_host(
    settings: Settings,
    sequences: Annotated[
        list[int] | None,
        typer.Option(
            "--sequences", min=1, help="Running answers; may be repeated. Default: 32, 256."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed.")] = 300,
    followers: Annotated[
        int,
        typer.Option(
            "--followers", min=0, help="Processes that get every step as ranks do, and run nothing."
        ),
    ] = 0,
    out: OutFile = None,
) -> None:
    """Microseconds of a step in which the engine's thread does not wait for the device, and their parts.

    Give --tensor-parallel-size for ranks with a GPU each. With --followers one GPU is enough: each step is
    sent to that many processes, which rebuild it, and waits are those of an engine with ranks.
    """
    from kvant.engine.build import build_engine
    from kvant.engine.process import search_rarely
    from kvant.measure.facts import command_line, measurement_facts

    clock = _Clock()
    clock.install()
    team = Followers(followers) if followers else None
    if team is not None:
        _wait_as_ranks_do()
    engine = build_engine(engine_config(settings)).engine
    if team is not None:
        team.follow(engine.runner)
    search_rarely()
    rows = [
        {"sequences": size, **measure(engine, clock, size, steps)} for size in sequences or SIZES
    ]
    for row in rows:
        sys.stdout.write(", ".join(f"{name} {value:.1f}" for name, value in row.items()) + "\n")
    if out is not None:
        facts = measurement_facts(
            command_line("python -m benchmarks.rank_host"), ["torch", "transformers"]
        )
        write_json(out, {**facts, "followers": followers, "steps": steps, "rows": rows})


def measure(engine: Engine, clock: _Clock, size: int, steps: int) -> dict[str, float]:
    """Returns medians in microseconds over decoding steps of `size` answers, and bytes of a sent step."""
    from kvant.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for number in range(size):
        engine.submit([(7 * number + i) % 97 + 3 for i in range(PROMPT_TOKENS)], params)
    while any(s.num_output_tokens < 4 for s in engine.scheduler.sequences()):
        engine.step()
    taken: list[dict[str, float]] = []
    for _ in range(steps):
        clock.spent.clear()
        begin = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - begin
        spent = dict(clock.spent)
        waited = spent.pop("wait", 0.0)
        taken.append({"step_us": whole, "host_us": whole - waited} | spent)
    for number in engine.numbers:
        engine.cancel(number)
    while engine.has_work:
        engine.step()
    names = list(dict.fromkeys(name for one in taken for name in one))
    return {
        name: statistics.median(one.get(name, 0.0) for one in taken)
        * (1e6 if name.endswith("_us") else 1)
        for name in names
    }


@dataclass
class _Clock:
    """Adds up what calls took in one step. spent: seconds by name; "sent_bytes" are bytes."""

    spent: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin

        return run

    def install(self) -> None:
        """Times waits for the device, and what is sent to ranks."""
        from kvant.execution.recorder import CudaRecorder
        from kvant.parallel.mirror import Sender
        from kvant.parallel.ring import Ring
        from kvant.parallel.watched import WatchedRecorder

        found: Any
        for found in (CudaRecorder, WatchedRecorder):
            found.mark = self._marking(found.mark)
        sender: Any = Sender
        sender.step = self.timed("encode_us", sender.step)
        ring: Any = Ring
        send = self.timed("send_us", ring.send)

        def counted(its: Any, payload: Any, links: Any) -> Any:
            self.spent["sent_bytes"] = memoryview(payload).nbytes
            return send(its, payload, links)

        ring.send = counted

    def _marking(self, mark: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(recorder: Any) -> _TimedMark:
            made = mark(recorder)
            return _TimedMark(made.record, self.timed("wait", made.synchronize))

        return timed  # not a class: it becomes a method


@dataclass(frozen=True, slots=True)
class _TimedMark:
    """A `Mark` whose waits are counted."""

    record: Callable[[], None]
    synchronize: Callable[[], None]


class Followers:
    """Processes that receive each step as other ranks do and rebuild its schedule. They end with this one."""

    def __init__(self, count: int) -> None:
        from kvant.parallel.ring import Ring

        self._ring = Ring(count, lambda: None)
        processes = multiprocessing.get_context("fork")
        self._links = []
        for number in range(count):
            ours, theirs = processes.Pipe()
            self._links.append(ours)
            processes.Process(
                target=_follow, args=(self._ring.fd, number, theirs), daemon=True
            ).start()

    def follow(self, runner: Any) -> None:
        """Makes a `ModelRunner` send what it launches."""
        from kvant.parallel.messages import encode_to_rank
        from kvant.parallel.mirror import Sender

        sender, launch = Sender(), runner.launch

        def send_and_launch(schedule: Any, table: Any, drafts: Any = None) -> Any:
            if (whole := sender.table(table, log_has_reader=runner.is_recorded)) is not None:
                self._ring.send(encode_to_rank(whole), self._links)
            sent = sender.step(schedule, table, drafts, log_has_reader=runner.is_recorded)
            self._ring.send(sent, self._links)
            return launch(schedule, table, drafts)

        runner.launch = send_and_launch


def _follow(fd: int, number: int, link: Any) -> None:
    import numpy as np

    from kvant.parallel.messages import read_to_rank
    from kvant.parallel.mirror import Receiver, Table
    from kvant.parallel.rank_process import SPIN_SECONDS
    from kvant.parallel.ring import RingReader

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    reader = RingReader(os.dup(fd), number, link, spin_seconds=SPIN_SECONDS)
    receiver = Receiver()
    while True:
        match read_to_rank(reader.receive()):
            case np.ndarray() as sent:
                receiver.step(sent)
            case Table() as table:
                receiver.take(table)


def _end_with(parent: int) -> None:
    """Ends this process once its parent, which may be killed, has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def _wait_as_ranks_do() -> None:
    from kvant.execution.runner import ModelRunner
    from kvant.parallel.watched import WatchedRecorder

    runner: Any = ModelRunner
    runner._recorder = lambda its: WatchedRecorder(its.device, lambda: None)


if __name__ == "__main__":
    run_command(rank_host)
