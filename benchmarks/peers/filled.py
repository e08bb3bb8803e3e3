"""Kvant's own engine for these measurements, with long contexts that need not be computed.

The cost of a decode step at 4096 tokens does not depend on their values. `FilledRunner` computes
one prompt, copies its pages to every other page, and then answers prompts at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from kvant.engine.engine import Engine
from kvant.engine.llm import LLM
from kvant.execution.batch import Drafts, Launched, build_batch, on_host
from kvant.execution.runner import ModelRunner
from kvant.kv.names import FormatRequest
from kvant.kv.pages import SCRATCH
from kvant.kv.saturation import Saturated
from kvant.measure.own_engine import engine_over, plan_storing, runner_of
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule

SAMPLE_TOKENS = 512
_STEP_TOKENS = 2048
_MARGIN_TOKENS = 128  # for the tokens that are decoded


class FilledRunner:
    """A runner that computes prompts until it is filled, and only single tokens afterwards."""

    def __init__(self, inner: ModelRunner, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._computed: set[int] = set()
        self._filled = False

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def fill(self) -> None:
        """Copies the pages computed so far over all others, byte for byte."""
        computed = torch.tensor(sorted(self._computed))
        num_pages = self._inner.pool.planes()[0].shape[0]
        source = computed[torch.arange(num_pages) % len(computed)]
        source[SCRATCH] = SCRATCH
        for plane in self._inner.pool.planes():
            plane.copy_(plane[source])
        self._filled = True

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        if not self._filled:
            self._computed.update(pages[0])
            self._inner.zero(pages)

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        if not self._filled or not schedule.num_prefills:
            return self._inner.launch(schedule, table, drafts)
        batch = build_batch(schedule, table, self._inner.model.plan.page_size, drafts)
        logits = torch.zeros(len(batch.logits_index), self._vocab_size)
        return on_host(schedule, batch, drafts, logits)

    def num_drafts(self, num_sequences: int) -> Sequence[int]:
        return self._inner.num_drafts(num_sequences)

    def check(self) -> None:
        self._inner.check()

    def count_saturated(self) -> Callable[[], tuple[Saturated, ...]]:
        return self._inner.count_saturated()


def engine_with(
    llm: LLM, stored: FormatRequest, *, batch: int, context: int, filled: bool
) -> Engine:
    """Builds an engine over the model of `llm` that stores K and V as asked; no prefix cache."""
    inner = runner_of(llm)
    plan = plan_storing(llm, stored)
    pages = -(-(context + _MARGIN_TOKENS) // plan.page_size)
    num_pages = SCRATCH + 1 + batch * pages
    own = ModelRunner(inner.model, num_pages, plan)
    runner = FilledRunner(own, llm.engine.vocab_size) if filled else own
    engine = engine_over(
        llm,
        runner,
        plan,
        num_pages,
        max_num_seqs=batch,
        max_num_batched_tokens=_STEP_TOKENS,
        max_model_len=pages * plan.page_size,
    )
    if isinstance(runner, FilledRunner):
        compute_sample(engine)
        runner.fill()
    return engine


def compute_sample(engine: Engine) -> None:
    """Computes a short prompt for `FilledRunner.fill`; the engine keeps nothing of it."""
    numbers = random.Random(0)
    prompt = [numbers.randrange(engine.vocab_size) for _ in range(SAMPLE_TOKENS)]
    number = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    while not engine.step():
        pass
    engine.cancel(number)
