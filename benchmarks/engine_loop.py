"""What a step of the engine's whole loop costs the host, over a device that costs nothing.

Every sequence answers a token a step through recorded steps, the next one launched ahead: from `step`
being called until it has handed on what every request got. There is no text.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.scheduler_steps import MODEL_LEN, PAGE_SIZE, PROMPT_TOKENS, STEP_TOKENS
from kvant.attention.base import Step
from kvant.engine.engine import Engine
from kvant.engine.garbage import search_rarely
from kvant.execution.batch import Batch
from kvant.execution.decodes import Decodes
from kvant.execution.graphs import StepGraphs
from kvant.execution.launched import Answered
from kvant.execution.runner import ReadFirst
from kvant.kv.pages import CacheIdentity
from kvant.kv.saturation import Saturated
from kvant.plan.limits import Limits
from kvant.sampling.sampling_params import SamplingParams

_VOCAB = 64


@dataclass(frozen=True, slots=True)
class Whole:
    """Microseconds of `Engine.step`, over the steps."""

    sequences: int
    steps: int
    median_us: float
    p99_us: float


class _Mark:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Nothing:
    """A device that says of every step at once that token 0 follows, and what recording needs of it."""

    def forward(self, ids: Tensor, step: Step, index: Tensor) -> Tensor:
        self._starts = step.positions  # where the graphs read them
        return torch.zeros(len(index), _VOCAB)

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        made = run()
        if not made:  # what draws
            return (lambda: None), made
        starts, places = self._starts, made[1].view(6, -1)[4]
        return lambda: (torch.add(starts, 1, out=places), None)[1], made

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def mark(self) -> _Mark:
        return _Mark()


class _Runner(ReadFirst):
    """A `Runner` of that device."""

    device = torch.device("cpu")
    looks_ahead = True

    def __init__(self, sequences: int) -> None:
        nothing = _Nothing()
        self._graphs = StepGraphs(
            nothing.forward,
            sequences,
            page_size=PAGE_SIZE,
            max_model_len=MODEL_LEN,
            device=self.device,
            recorder=nothing,
        )
        self._graphs.capture()

    def zero(self, pages: Sequence[int]) -> None: ...

    def saturated(self) -> tuple[Saturated, ...]:
        return ()

    def recorded(self, num_sequences: int) -> Sequence[int]:
        return self._graphs.num_drafts(num_sequences)

    def run_decodes(self, step: Decodes) -> Tensor:
        return self._graphs.run(step)

    def read_decodes(self) -> Answered:
        return self._graphs.read()

    def run(self, batch: Batch) -> Tensor:
        self._graphs.forget()
        return torch.zeros(len(batch.sampled), _VOCAB)


def full_engine(sequences: int) -> Engine:
    """So many sequences that are answering, with contexts of the scheduler's loads."""
    limits = Limits(sequences, STEP_TOKENS + sequences, MODEL_LEN, PAGE_SIZE, pages_ahead=True)
    pages = sequences * (MODEL_LEN // PAGE_SIZE) + 1
    identity = CacheIdentity("bench", None, "plan")
    engine = Engine(_Runner(sequences), limits, pages, identity=identity, vocab_size=_VOCAB)
    numbers = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for _ in range(sequences):
        length = numbers.randint(*PROMPT_TOKENS)
        engine.submit([numbers.randrange(_VOCAB) for _ in range(length)], params)
    while any(s.num_output_tokens < 4 for s in engine.scheduler.sequences()):
        engine.step()
    return engine


def measure_whole(sequences: int, steps: int) -> Whole:
    """Garbage is searched as in a server's engine process."""
    engine = full_engine(sequences)
    usual = gc.get_threshold()
    search_rarely()
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin)
    gc.unfreeze()
    gc.set_threshold(*usual)
    worst = sorted(taken)[min(steps - 1, int(0.99 * steps))]
    return Whole(sequences, steps, statistics.median(taken) * 1e6, worst * 1e6)
