"""Cost of a step without the model: scheduling, building the batch, recording what was run.

Every sequence gets one token per step. In the mixed load a few sequences end in every step and as many new
ones with different prompts arrive, so that steps hold decodes and prefills. Without a model, tokens are
made up.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvant.execution.batch import build_batch
from kvant.kv.pages import CacheIdentity, SharedPages, root_hash
from kvant.plan.limits import Limits
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason, Request, Sequence
from kvant.scheduling.scheduler import Scheduler

PAGE_SIZE = 16
MODEL_LEN = 4096
STEP_TOKENS = 8192
PROMPT_TOKENS = (256, 768)  # drawn evenly
MIXED_TURNOVER = 64  # in the mixed load, one sequence in this many ends per step
_TOKENS = 50_000
_PARAMS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds per step: medians over the steps of the whole and of each part.

    tokens: per step, on average. p99_us: of the whole.
    """

    load: str
    sequences: int
    steps: int
    tokens: float
    schedule_us: float
    build_us: float
    advance_us: float
    total_us: float
    p99_us: float


class Load:
    """A scheduler full of answering sequences. turnover: how many are replaced in each step."""

    def __init__(self, sequences: int, turnover: int, *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._number = 0
        limits = Limits(sequences, STEP_TOKENS, MODEL_LEN, PAGE_SIZE)
        pages = sequences * (MODEL_LEN // PAGE_SIZE) + 1
        self.scheduler = Scheduler(limits, SharedPages(pages))
        self._turnover = turnover
        for _ in range(sequences):
            self._arrive()
        while any(s.num_output_tokens == 0 for s in self.scheduler.sequences()):
            self.step()

    def step(self) -> tuple[float, float, float, int]:
        """Returns seconds to schedule, to build and to advance, and the tokens of the step."""
        clock = time.perf_counter
        begin = clock()
        schedule = self.scheduler.schedule()
        scheduled = clock()
        assert schedule is not None
        batch = build_batch(schedule, self.scheduler.table, PAGE_SIZE)
        built = clock()
        sampling = [
            s for s, samples in zip(schedule.sequences, schedule.samples, strict=True) if samples
        ]
        tokens = [self._random.randrange(_TOKENS) for _ in sampling]
        began = clock()
        for sequence, token in zip(sampling, tokens, strict=True):
            self.scheduler.follow(sequence)
            self.scheduler.append(sequence, token)
        self.scheduler.commit(schedule)
        ended = clock()
        return scheduled - begin, built - scheduled, ended - began, len(batch.input_ids)

    def turn_over(self) -> float:
        """Ends some sequences at random places and submits as many.

        Returns the seconds that ending them took.
        """
        taken = 0.0
        for ending in self._random.sample(self.scheduler.sequences(), self._turnover):
            begin = time.perf_counter()
            self.scheduler.finish(ending, FinishReason.STOP)
            taken += time.perf_counter() - begin
            self._arrive()
        return taken

    def _arrive(self) -> None:
        length = self._random.randint(*PROMPT_TOKENS)
        prompt = tuple(self._random.randrange(_TOKENS) for _ in range(length))
        request = Request(self._number, prompt, _PARAMS, self._number, MODEL_LEN)
        root = root_hash(CacheIdentity("bench", None, ""))
        self._number += 1
        self.scheduler.add(Sequence(request, list(prompt), [root]))


def measure(load: str, sequences: int, steps: int) -> Row:
    """Measures one line of the table; loads are "decode" and "mixed"."""
    turnover = -(-sequences // MIXED_TURNOVER) if load == "mixed" else 0
    running = Load(sequences, turnover)
    for _ in range(3):
        running.step()
    taken = []
    # The garbage of making the load is not the steps'; what steps leave is collected as usual.
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        ending = running.turn_over()
        schedule, build, advance, tokens = running.step()
        taken.append((schedule, build, advance + ending, tokens))
    gc.unfreeze()
    totals = sorted(sum(step[:3]) for step in taken)

    def median_us(part: int) -> float:
        return statistics.median(step[part] for step in taken) * 1e6

    return Row(
        load,
        sequences,
        steps,
        statistics.fmean(step[3] for step in taken),
        median_us(0),
        median_us(1),
        median_us(2),
        statistics.median(totals) * 1e6,
        totals[min(len(totals) - 1, int(0.99 * len(totals)))] * 1e6,
    )


def run(sizes: tuple[int, ...], steps: int) -> Iterator[Row]:
    """Measures every size under both loads."""
    for load in ("decode", "mixed"):
        for sequences in sizes:
            yield measure(load, sequences, steps)
