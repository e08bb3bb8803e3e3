"""Times an engine's own steps: decode steps of some sequences at some context, and prompts.

Everything runs in this process through `Engine.step`, greedy, with random tokens that no two requests
share. So the time is what a request waits for.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks import device_idle
from benchmarks.device_idle import Idle, NotProfiled, measure_idle
from kvant.engine.engine import Engine
from kvant.execution.runner import ModelRunner
from kvant.sampling.sampling_params import SamplingParams

WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """decode: `batch` sequences that have `context` tokens each get one token per step.
    Otherwise prefill: `batch` prompts of `context` tokens, until each has its first token.
    """

    decode: bool
    batch: int
    context: int

    def __str__(self) -> str:
        kind = "decode" if self.decode else "prefill"
        return f"{kind}, batch {self.batch}, {self.context} tokens"


@dataclass(frozen=True, slots=True)
class Timing:
    """milliseconds: of each step (decode), or of each whole prompt (prefill). tokens: new tokens in each.

    python_share: of the decode steps' time that was not spent in compiled code; None if
    unknown. idle: of the device in further decode steps, None if not asked for.
    """

    case: Case
    tokens: int
    milliseconds: tuple[float, ...]
    python_share: float | None = None
    idle: Idle | NotProfiled | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second at the median: new tokens of decode steps, prompt tokens of prefill."""
        return 1000 * self.tokens / self.median_ms


def time_engine(
    engine: Engine, cases: Iterable[Case], *, repeats: int = 20, profiled: int = 0
) -> Iterator[Timing]:
    """Times each case on an engine without other requests.

    repeats: decode steps, or a fifth as many prompts. profiled: decode steps after them, for
    `Timing.idle`. The engine must admit the batch and the context (`max_num_seqs`, `max_model_len`,
    with `steps_of` decode steps), and stays usable.
    """
    for seed, case in enumerate(cases):
        numbers = random.Random(seed)
        if case.decode:
            yield _decode(engine, case, repeats, profiled, numbers)
        else:
            runs = [_prefill(engine, case, numbers) for _ in range(1 + max(1, repeats // 5))]
            yield Timing(case, case.batch * case.context, tuple(runs[1:]))


def steps_of(repeats: int, profiled: int) -> int:
    """Returns the decode steps of one case."""
    return WARM_UP_STEPS + repeats + (device_idle.WARM_UP_STEPS + profiled if profiled else 0)


def _decode(
    engine: Engine, case: Case, repeats: int, profiled: int, numbers: random.Random
) -> Timing:
    new = steps_of(repeats, profiled) + 1
    started = _submit(engine, case, new, numbers)
    waiting = set(started)
    while waiting:  # prompts, in chunks
        waiting -= {piece.number for piece in engine.step()}

    def step() -> None:
        pieces = engine.step()
        assert len(pieces) == case.batch, "every sequence goes on by one token"

    times: list[float] = []
    compiled: float | None = None
    for number in range(WARM_UP_STEPS + repeats):
        if number == WARM_UP_STEPS:
            compiled = _compiled_seconds(engine)
        begin = time.perf_counter()
        if number:
            step()
        else:
            engine.step()  # behind a step that was read at once it only launches, and returns nothing
        times.append(1000 * (time.perf_counter() - begin))
    timed = times[WARM_UP_STEPS:]
    share = None
    if compiled is not None:
        share = 1 - 1000 * ((_compiled_seconds(engine) or 0) - compiled) / sum(timed)
    idle: Idle | NotProfiled | None = None
    if profiled:
        idle = measure_idle(engine.runner.device, step, profiled)
    for number in started:
        engine.cancel(number)
    return Timing(case, case.batch, tuple(timed), share, idle)


def _compiled_seconds(engine: Engine) -> float | None:
    runner = engine.runner
    return runner.model.compiled_seconds if isinstance(runner, ModelRunner) else None


def _prefill(engine: Engine, case: Case, numbers: random.Random) -> float:
    waiting = set(_submit(engine, case, 2, numbers))
    begin = time.perf_counter()
    started = set(waiting)
    while waiting:
        waiting -= {piece.number for piece in engine.step()}
    spent = 1000 * (time.perf_counter() - begin)
    for number in started:
        engine.cancel(number)
    return spent


def _submit(engine: Engine, case: Case, new: int, numbers: random.Random) -> list[int]:
    # Sequences that start first continue while the others' prompts are computed, step by step.
    spare = case.batch * -(-case.context // engine.limits.max_num_batched_tokens) + case.batch
    params = SamplingParams(temperature=0.0, max_tokens=new + spare, ignore_eos=True)
    return [
        engine.submit([numbers.randrange(engine.vocab_size) for _ in range(case.context)], params)
        for _ in range(case.batch)
    ]
