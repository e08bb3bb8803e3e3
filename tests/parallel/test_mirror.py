"""What another rank makes of a sent step equals what rank 0 runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvant.execution.batch import Batch, Drafts, Launched, Outcome, build_batch
from kvant.parallel.messages import encode_to_rank, read_to_rank
from kvant.parallel.mirror import NEXT, STEP, Receiver, Sender, Table, read_zero, sent_zero
from kvant.parallel.ring import Payload
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.row_table import RowTable
from kvant.scheduling.scheduler import Schedule
from tests.engine.fakes import VOCAB, RememberingRunner, make_engine
from tests.engine.in_flight import RecordedRunner, make, some_params


class Mirror:
    """Checks each step of a runner against the batch that the other side would run."""

    def __init__(self, runner: RememberingRunner) -> None:
        self.page_size = runner.stored.shape[1]
        self.sender, self.receiver = Sender(), Receiver()
        self.num_checked = 0
        self.launch_here = runner.launch

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        if (whole := self.sender.table(table, log_has_reader=False)) is not None:
            there = read_to_rank(encode_to_rank(whole))
            assert isinstance(there, Table)
            self.receiver.take(there)
        sent = self.sender.step(schedule, table, drafts, log_has_reader=False)
        arrived = read_to_rank(_bytes(sent))
        assert isinstance(arrived, np.ndarray)
        found, drafts_there = self.receiver.step(arrived)
        assert drafts_there == (None if drafts is None else list(drafts))
        size = self.page_size
        batch_there = build_batch(found, self.receiver.table, size, drafts_there)
        _same(build_batch(schedule, table, size, drafts), batch_there)
        rows = schedule.rows
        assert (self.receiver.table.sampling[rows] == table.sampling[rows]).all()
        assert (self.receiver.table.seeds[rows] == table.seeds[rows]).all()
        assert (self.receiver.table.num_prompt[rows] == table.num_prompt[rows]).all()

        assert [getattr(found, name) for name in _STATES] == [
            getattr(schedule, name) for name in _STATES
        ]
        for name in ("limits", "max_drafts"):
            here, there = getattr(schedule, name), getattr(found, name)
            assert (here is None) == (there is None)
            assert here is None or (here == there).all()
        self.num_checked += 1
        return self.launch_here(schedule, table, drafts)


_STATES = "states_to_place", "states_to_load", "states_to_keep", "needs_host", "num_drafts"


def _bytes(sent: Payload) -> bytes:
    return sent if isinstance(sent, bytes) else sent.tobytes()


def _same(here: Batch, there: Batch) -> None:
    assert torch.equal(here.input_ids, there.input_ids)
    assert torch.equal(here.logits_index, there.logits_index)
    assert (here.num_sampled, here.first_rows) == (there.num_sampled, there.first_rows)
    for name in ("cu_seqlens_q", "seqlens_kv", "slot_mapping", "positions"):
        assert torch.equal(getattr(here.step, name), getattr(there.step, name)), name
    size = here.step.seqlens_kv.numel()
    assert there.step.page_table.shape == here.step.page_table.shape
    for row in range(size):  # entries behind a sequence's end are never read
        used = -(-int(here.step.seqlens_kv[row]) // _PAGE)
        assert torch.equal(here.step.page_table[row, :used], there.step.page_table[row, :used])
    assert (here.step.wanted is None) == (there.step.wanted is None)


_PAGE = 4


def test_every_step_arrives_whole_under_pressure_and_cancels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = random.Random(1)
    engine, runner = make_engine(
        num_pages=24, page_size=_PAGE, max_num_seqs=5, max_num_batched_tokens=9
    )
    mirror = Mirror(runner)
    monkeypatch.setattr(runner, "launch", mirror.launch)
    numbers = []
    for turn in range(120):
        if turn < 60 and drawn.random() < 0.8:
            prompt = [drawn.randrange(4, VOCAB) for _ in range(drawn.randrange(1, 22))]
            params = SamplingParams(
                temperature=drawn.choice([0.0, 1.0]), seed=drawn.randrange(9), max_tokens=12,
                prompt_logprobs=drawn.choice([None, None, 1]), ignore_eos=True,
            )  # fmt: skip
            numbers.append(engine.submit(prompt, params))
        if numbers and drawn.random() < 0.1:
            engine.cancel(drawn.choice(numbers))
        engine.step()
    assert mirror.num_checked > 60
    assert engine.stats.num_preemptions > 0


class Follower:
    """Runs each recorded step of a runner a second time, from what is sent of it, on pages of its own.

    kinds: how many steps were sent with each first word. most: the longest step that follows, in bytes.
    """

    def __init__(self, runner: RecordedRunner, there: RecordedRunner) -> None:
        self.launch_here, self.zero_here, self.there = runner.launch, runner.zero, there
        self.sender, self.receiver = Sender(), Receiver()
        self.cleared: Sequence[Sequence[int]] = ()
        self.kinds = Counter[int]()
        self.most = 0

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        self.cleared = pages
        self.zero_here(pages)

    def launch(self, schedule: Schedule, table: RowTable, drafts: Drafts | None = None) -> Launched:
        if (whole := self.sender.table(table, log_has_reader=True)) is not None:
            told = read_to_rank(encode_to_rank(whole))
            assert isinstance(told, Table)
            self.receiver.take(told)
        cleared, self.cleared = self.cleared, ()
        sent = self.sender.step(schedule, table, drafts, log_has_reader=True, cleared=cleared)
        data = _bytes(sent)
        arrived = read_to_rank(data)
        assert isinstance(arrived, np.ndarray)
        self.kinds[int(arrived[0])] += 1
        if arrived[0] == NEXT:
            self.most = max(self.most, len(data))
        found, drafts_there = self.receiver.step(arrived)
        if found.pages_to_zero:
            self.there.zero(found.pages_to_zero)
        here = self.launch_here(schedule, table, drafts)
        there = self.there.launch(found, self.receiver.table, drafts_there)

        def read() -> Outcome:
            outcome, other = here.read(), there.read()
            assert other == outcome
            return outcome

        return replace(here, read=read)


@pytest.mark.parametrize("num_drafts", [(), (2, 0)])
@pytest.mark.parametrize("mixed", [0, 16])
def test_ranks_that_get_changes_alone_find_the_same_tokens(
    mixed: int, num_drafts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = random.Random(mixed + len(num_drafts))
    engine, runner = make(22, mixed=mixed, num_drafts=num_drafts)
    there = RecordedRunner(22, 6, 60, mixed=mixed, num_drafts=num_drafts)
    follower = Follower(runner, there)
    monkeypatch.setattr(runner, "launch", follower.launch)
    monkeypatch.setattr(runner, "zero", follower.zero)
    numbers: list[int] = []
    for turn in range(400):
        if turn < 300 and drawn.random() < 0.2:
            prompt = [drawn.randrange(4, VOCAB) for _ in range(drawn.randrange(1, 22))]
            numbers.append(engine.submit(prompt, some_params(drawn)))
        if numbers and drawn.random() < 0.02:
            engine.cancel(drawn.choice(numbers))
        engine.step()
    engine.audit()
    assert engine.stats.num_preemptions > 0
    assert follower.kinds[STEP] > 40
    if not num_drafts:
        assert follower.kinds[NEXT] > 80
        assert follower.most < 8 * (4 + 6 * (3 + 2) + 2)  # at most a page and its change a sequence


def test_pages_to_zero_arrive_by_group() -> None:
    for pages in ([[3, 4], []], [[], [7]], [[1]]):
        assert read_zero(sent_zero(pages)) == pages
