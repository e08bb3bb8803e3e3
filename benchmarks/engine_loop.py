"""Host time of the engine's whole loop, over a device that takes no time.

Every sequence gets a token per step from CUDA graphs, with one step in flight. The time runs from the call of
`step` until it returns every request's tokens. There is no text.
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
from kvant.engine.process import search_rarely
from kvant.execution.batch import Drafts, Launched
from kvant.execution.graphs import StepGraphs
from kvant.kv.pages import CacheIdentity
from kvant.kv.saturation import Saturated
from kvant.plan.limits import Limits
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule

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
    """A device that finds token 0 in every step at once, with the interface that recording needs."""

    def forward(self, ids: Tensor, step: Step, index: Tensor) -> Tensor:
        return torch.zeros(len(index), _VOCAB)

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        made = run()
        if made and made[-1].dtype == torch.int64:  # what a step found: every row is sound, token 0
            sound, tokens = made[-1].view(2, -1)
            sound.fill_(1)
            tokens.zero_()
        return (lambda: None), made

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    def mark(self) -> _Mark:
        return _Mark()


class _Runner:
    """A `Runner` of that device."""

    device = torch.device("cpu")

    def __init__(self, sequences: int) -> None:
        nothing = _Nothing()
        self._graphs = StepGraphs(
            nothing.forward,
            sequences,
            max_num_batched_tokens=0,
            page_size=PAGE_SIZE,
            max_model_len=MODEL_LEN,
            device=self.device,
            recorder=nothing,
            run=lambda batch, ids: torch.zeros(len(batch.logits_index), _VOCAB),
        )
        self._graphs.capture()

    def zero(self, pages: Sequence[Sequence[int]]) -> None: ...

    def check(self) -> None: ...

    def count_saturated(self) -> Callable[[], tuple[Saturated, ...]]:
        return lambda: ()

    def num_drafts(self, num_sequences: int) -> Sequence[int]:
        return self._graphs.num_drafts(num_sequences)

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        return self._graphs.launch(schedule, table, drafts)


def full_engine(sequences: int) -> Engine:
    """Builds an engine with this many answering sequences, with contexts of the scheduler's loads."""
    limits = Limits(sequences, STEP_TOKENS + sequences, MODEL_LEN, PAGE_SIZE)
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
    """Times steps; the cycle collector is set as in a server's engine process."""
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
