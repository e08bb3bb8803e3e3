"""A fake model whose steps are recorded and launched one ahead, and what tests ask of it."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvant.attention.base import ShortSteps, Step
from kvant.engine.engine import Engine
from kvant.engine.result import Progress, Result
from kvant.execution.batch import Batch, Drafts, Launched, Outcome
from kvant.execution.graphs import StepGraphs
from kvant.execution.speculation import Speculation
from kvant.kv.pages import CacheIdentity
from kvant.plan.limits import Limits
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import Status
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule
from kvant.speculative.base import Ask
from tests.engine.fakes import EOS, UNWRITTEN, VOCAB, RememberingRunner, finish, logits, make_engine
from tests.speculative.recorded import Again

PAGE = 4
SHORT = ShortSteps(tokens=24, seqs=4)
"""Decodes that are recorded a second time."""


class RecordedRunner(RememberingRunner):
    """Its steps are recorded and launched ahead.

    mixed: tokens of recorded steps with pieces of prompts, 0 for none. num_drafts: of recorded steps with
    drafts, which are right but at every `wrong_every`-th position.
    Without drafts no slot may be written twice: a page that changes its owner is cleared in between.
    """

    def __init__(
        self, num_pages: int, max_num_seqs: int, max_model_len: int, *, mixed: int = 0,
        num_drafts: Sequence[int] = (), wrong_every: int = 3,
    ) -> None:  # fmt: skip
        super().__init__(num_pages, PAGE)
        self._rewrites = bool(num_drafts)
        self._to_clear: Sequence[Sequence[int]] = ()
        self.num_cleared = Counter[str]()
        self.longest = Counter[int]()
        self._wrong_every = wrong_every
        self.graphs = StepGraphs(
            self._forward,
            max_num_seqs,
            max_num_batched_tokens=mixed,
            page_size=PAGE,
            max_model_len=max_model_len,
            device=self.device,
            recorder=Again(),
            run=self._run,
            draft=self._draft if num_drafts else None,
            num_drafts=num_drafts,
            eraser=None if num_drafts else self,
            short=SHORT,
        )
        self.graphs.capture()

    def num_drafts(self, num_sequences: int) -> Sequence[int]:
        return self.graphs.num_drafts(num_sequences)

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        cleared, self._to_clear = self._to_clear, ()
        return self.graphs.launch(schedule, table, drafts, cleared)

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        if self._rewrites:
            super().zero(pages)
        else:
            self._to_clear = pages

    def clear(self, pages: Sequence[Sequence[int]]) -> None:
        self.num_cleared["at once"] += sum(map(len, pages))
        super().zero(pages)

    def clear_listed(self, entries: Tensor) -> None:
        pages = entries[entries > 0].tolist()
        self.num_cleared["in steps"] += len(pages)
        super().zero([pages])

    def _run(self, batch: Batch, input_ids: Tensor) -> Tensor:
        if self._rewrites:
            self.stored.view(-1)[batch.step.slot_mapping] = UNWRITTEN
        assert (input_ids >= 0).all()
        return super().run(replace(batch, input_ids=input_ids))

    def _forward(self, ids: Tensor, step: Step, index: Tensor) -> Tensor:
        flat = self.stored.view(-1)
        assert step.seqlens_kv.max() <= step.max_seqlen_kv
        if step.seqlens_kv.any():
            self.longest[step.max_seqlen_kv] += 1
        for token, slot in zip(ids.tolist(), step.slot_mapping.tolist(), strict=True):
            if slot >= 0:
                assert slot >= PAGE, "the scratch page is written by a request"
                assert 0 <= token < VOCAB
                assert self._rewrites or flat[slot] == UNWRITTEN, "a slot is written twice"
                flat[slot] = token
        rows = []
        for place in index.tolist():
            context = self._context(step, place)
            assert not context or step.positions[place] == len(context) - 1
            is_poisoned = bool(context) and self.poison(context)
            rows.append(torch.full((VOCAB,), torch.nan) if is_poisoned else logits(context))
        return torch.stack(rows)

    def _context(self, step: Step, place: int) -> list[int]:
        """What the token at a place of a step sees; nothing for padding."""
        ends = step.cu_seqlens_q.tolist()
        if place >= ends[-1]:
            return []
        sequence = bisect_right(ends, place) - 1
        length = int(step.seqlens_kv[sequence]) - (ends[sequence + 1] - 1 - place)
        if length <= 0:
            return []
        pages = step.page_table[sequence, : -(-length // PAGE)].long()
        context: list[int] = self.stored[pages].flatten()[:length].tolist()
        assert min(context) >= 0, "a token is read that was not written"
        return context

    def _draft(self, tokens: Tensor, step: Step) -> Tensor:
        """`DeviceProposer.draft`: sees only what the model has stored."""
        found = tokens.clone()
        ends = step.cu_seqlens_q.tolist()
        for place, (first, end) in enumerate(itertools.pairwise(ends)):
            start = int(step.positions[first])
            if step.seqlens_kv[place] == 0 or end == first + 1:
                continue
            pages = step.page_table[place, : -(-start // PAGE)].long()
            context = [*self.stored[pages].flatten()[:start].tolist(), int(tokens[first])]
            assert min(context) >= 0, "a token is read that was not written"
            drafts = drafts_behind(context, end - first - 1, self._wrong_every)
            found[first + 1 : end] = torch.tensor(drafts)
        return found.clamp_(min=0)


def drafts_behind(context: Sequence[int], count: int, wrong_every: int) -> list[int]:
    """The fake model's answer, but for every `wrong_every`-th position."""
    found = list(context)
    for _ in range(count):
        token = int(logits(found).argmax())
        found.append((token + 1) % VOCAB if len(found) % wrong_every == 0 else token)
    return found[len(context) :]


class HostDrafts:
    """The proposer of steps that are not recorded; it drafts the same."""

    taps: tuple[int, ...] = ()

    def __init__(self, wrong_every: int) -> None:
        self._wrong_every = wrong_every

    def zero(self, pages: Sequence[int]) -> None:
        assert 0 not in pages

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [drafts_behind(ask.token_ids, ask.num_tokens, self._wrong_every) for ask in asks]

    def learn(self, step: Step, hidden: tuple[Tensor, ...]) -> None:
        raise AssertionError("it has no taps")


def make(
    num_pages: int, *, seqs: int = 6, tokens: int = 32, longest: int = 60, stride: int = 1,
    mixed: int = 0, tokenizer: Tokenizer | None = None, num_drafts: Sequence[int] = (),
    wrong_every: int = 3, adaptive: bool = False,
) -> tuple[Engine, RecordedRunner]:  # fmt: skip
    """An engine whose steps are recorded. num_drafts: of its steps with drafts, the most first."""
    runner = RecordedRunner(
        num_pages, seqs, longest, mixed=mixed, num_drafts=num_drafts, wrong_every=wrong_every
    )
    speculation = None
    if num_drafts:
        speculation = Speculation(
            HostDrafts(wrong_every), num_drafts[0], VOCAB, adaptive=adaptive, ways=runner.num_drafts
        )
    engine = Engine(
        runner,
        Limits(seqs, tokens, longest, PAGE, prompt_stride=stride),
        num_pages,
        identity=CacheIdentity("fake", None, "plan"),
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        tokenizer=tokenizer,
        speculation=speculation,
    )
    return engine, runner


WISHES: tuple[dict[str, Any], ...] = (
    {}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.8}, {"min_p": 0.05, "top_k": 20},
)  # fmt: skip


def some_params(numbers: random.Random) -> SamplingParams:
    """Greedy and sampling requests of all kinds; few whose steps cannot be launched ahead."""
    given: dict[str, Any] = {"temperature": 0.0}
    if numbers.random() < 0.6:
        heat = numbers.choice((0.3, 1.0, 2.0))
        given = {"temperature": heat, "seed": numbers.randrange(50), **numbers.choice(WISHES)}
    if numbers.random() < 0.04:
        given |= numbers.choice(
            ({"logprobs": 1}, {"presence_penalty": 1.0}, {"min_tokens": 9}, {"prompt_logprobs": 2})
        )
    ignored = numbers.random() < 0.7
    tokens = (
        numbers.choice((10, 11, 30)) if "min_tokens" in given else numbers.choice((1, 2, 11, 30))
    )
    if "prompt_logprobs" in given:
        tokens = numbers.choice((0, 1, 11))
    return SamplingParams(max_tokens=tokens, ignore_eos=ignored, **given)


def alone(prompt: list[int], params: SamplingParams) -> Result:
    """The same request by itself, in steps each of which is read before the next begins."""
    engine, _ = make_engine()
    number = engine.submit(prompt, params)
    return finish(engine)[number]


class Admissions:
    """Which requests would be admitted by the next step, told beforehand by a copy of the scheduler."""

    def __init__(self) -> None:
        self.missed: Counter[int] = Counter()
        self.most = 0
        self.num_begun = 0

    def step(self, engine: Engine) -> list[Progress]:
        """A step. num_begun: requests that could be admitted. most: how often in a row one was not."""
        scheduler = deepcopy(engine.scheduler)
        waited = [s for s in scheduler.sequences() if s.status is Status.WAITING]
        scheduler.abandon()  # as if the step in flight had been read
        scheduler.schedule()
        begun = {s.number for s in waited if s.status is Status.RUNNING}
        self.num_begun += len(begun)
        try:
            return engine.step()
        finally:
            still = {s.number for s in engine.scheduler.sequences() if s.status is Status.WAITING}
            for number in {s.number for s in waited}:
                self.missed[number] = self.missed[number] + 1 if number in begun & still else 0
                self.most = max(self.most, self.missed[number])


def step_that_fails(
    engine: Engine, runner: RecordedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose tokens cannot be read, while the next one is in flight; the engine stays sound."""
    launch = runner.launch

    def fail() -> Outcome:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as broken:
        broken.setattr(runner, "launch", lambda *given: replace(launch(*given), read=fail))
        engine.step()
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    engine.audit()
