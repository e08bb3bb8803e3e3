"""The scheduler and its row table alone: steps are scheduled one ahead of being committed, without a model.

A test plays the device and the engine. It decides how many drafts are accepted, which sequences end or are
cancelled, and when a step is read. After every move the table must count what is known, what is in
flight, and pages for all of it.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.kv.pages import SCRATCH, CacheIdentity, SharedPages, root_hash
from kvant.plan.limits import Limits
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason, Request, Sequence, Status
from kvant.scheduling.scheduler import Schedule, Scheduler

PAGE = 4
LONGEST = 48
_IDENTITY = CacheIdentity("test", None, "plan")


class Play:
    """A scheduler, its sequences, and the schedules that were not committed, oldest first."""

    def __init__(self, seed: int) -> None:
        self.numbers = numbers = random.Random(seed)
        self.num_drafts = numbers.choice((0, 0, 1, 4))
        limits = Limits(
            numbers.randint(1, 5), numbers.choice((5, 8, 30)), LONGEST, PAGE,
            prefix_caching=numbers.random() < 0.7, prompt_stride=numbers.choice((1, 1, 4)),
        )  # fmt: skip
        self.scheduler = Scheduler(limits, SharedPages(numbers.choice((13, 16, 20, 60))))
        self.table = self.scheduler.table
        self.in_flight: deque[Schedule] = deque()
        self.sequences: dict[int, Sequence] = {}
        self.seen: dict[str, int] = dict.fromkeys(
            (
                "ahead",
                "uncertain",
                "short",
                "ended",
                "reused",
                "preempted",
                "accepted",
                "shared",
            ),
            0,
        )

    def arrive(self) -> None:
        number = len(self.sequences)
        # Many share a beginning, or all of their prompt.
        prompt = [0] * self.numbers.choice((1, 4, 8, 9, 12, 16))
        prompt += [self.numbers.randrange(3) for _ in range(self.numbers.choice((0, 0, 1, 5)))]
        total = self.numbers.randint(len(prompt) + 1, LONGEST)
        params = SamplingParams(temperature=0.0, max_tokens=total - len(prompt))
        request = Request(number, tuple(prompt), params, 0, total)
        self.sequences[number] = Sequence(request, prompt, [root_hash(_IDENTITY)])
        self.scheduler.add(self.sequences[number])

    def schedule(self) -> None:
        """Launch a step behind the one in flight, or read that first where pages are short."""
        before = list(self.in_flight)
        schedule = self.scheduler.schedule(self.num_drafts)
        if schedule is None:
            assert before, "nothing is in flight that could be waited for"
            self.seen["short"] += 1
            self.read()
            schedule = self.scheduler.schedule(self.num_drafts)
            assert schedule is not None
        assert not schedule.preempted or not self.in_flight, "a step in flight writes their pages"
        self.seen["preempted"] += len(schedule.preempted)
        if not schedule.sequences:
            assert self.in_flight or not self.scheduler.has_work, "nothing runs, nothing will"
            return
        self.check(schedule)
        self.in_flight.append(schedule)

    def check(self, schedule: Schedule) -> None:
        """A schedule runs each sequence's next tokens, within its pages and its request."""
        limits, table = self.scheduler.limits, self.table
        drafts = np.zeros_like(schedule.counts)
        if schedule.max_drafts is not None:
            drafts = schedule.max_drafts
            assert (drafts >= 0).all()
            assert (drafts <= self.num_drafts).all()
            assert not drafts[schedule.num_decodes :].any(), "pieces of prompts have none"
        assert 0 < schedule.num_tokens + drafts.sum() <= limits.max_num_batched_tokens
        assert len(set(schedule.rows.tolist())) == len(schedule.sequences)
        held = -np.ones_like(drafts) if schedule.limits is None else schedule.limits
        self.seen["ahead"] += bool(schedule.is_pending.any())
        self.seen["uncertain"] += bool((held >= 0).any())
        lengths = schedule.counts + drafts
        for place, sequence in enumerate(schedule.sequences):
            self.seen["shared"] += bool(sequence.num_cached_tokens)
            row, start, limit = sequence.row, int(schedule.starts[place]), int(held[place])
            assert sequence.status is Status.RUNNING
            assert row == schedule.rows[place]
            assert table.owner[row] == sequence.number == schedule.numbers[place]
            end = start + int(lengths[place])
            if limit >= 0:  # the device stores nothing from there on
                end = min(end, limit)
            assert end <= len(sequence.pages) * PAGE, "a token has no page"
            assert table.pages[row, : len(sequence.pages)].tolist() == sequence.pages
            assert SCRATCH not in sequence.pages
            # The last token that a request may have is never run.
            assert end < sequence.request.max_total_tokens
            waiting = [s for s in self.in_flight if sequence.number in s.numbers]
            if not waiting:
                assert (limit, bool(schedule.is_pending[place])) == (-1, False)
            is_pending = any(s.samples[s.sequences.index(sequence)] for s in waiting)
            assert bool(schedule.is_pending[place]) == is_pending
            if place < schedule.num_decodes:
                assert schedule.counts[place] == 1
                assert schedule.samples[place]
                if not is_pending:
                    assert start == sequence.num_tokens - 1, "its newest token runs"
            else:
                assert end <= sequence.num_tokens
                assert bool(schedule.samples[place]) == (end == sequence.num_tokens)

    def read(self) -> None:
        """Commit the oldest step: every sequence gets some of its tokens, some of them end."""
        schedule, scheduler, numbers = self.in_flight.popleft(), self.scheduler, self.numbers
        found = np.zeros(len(schedule.sequences), np.int64)
        for place, sequence in enumerate(schedule.sequences):
            if sequence.status is Status.FINISHED:
                self.seen["ended"] += 1
                self.seen["reused"] += bool(self.table.owner[schedule.rows[place]] >= 0)
                continue
            if not schedule.samples[place]:
                continue
            most = int(schedule.most_tokens[place])
            if schedule.limits is not None and schedule.limits[place] >= 0:
                most = min(most, int(schedule.limits[place]) - (sequence.num_tokens - 1))
                assert most > 0, "a sequence that goes on has room for a token"
            wanted = numbers.choice((1, most, numbers.randint(1, most)))
            self.seen["accepted"] += wanted > 1
            is_broken = numbers.random() < 0.02
            for _ in range(0 if is_broken else wanted):
                scheduler.follow(sequence)
                scheduler.append(sequence, numbers.randrange(3))
                found[place] += 1
                if sequence.num_tokens == sequence.request.max_total_tokens:
                    scheduler.finish(sequence, FinishReason.LENGTH)
                    break
                if numbers.random() < 0.05:
                    scheduler.finish(sequence, FinishReason.STOP)
                    break
            if is_broken:
                scheduler.finish(sequence, FinishReason.NUMERICAL_ERROR)
        is_whole = (found == schedule.most_tokens).all() and scheduler.still_runs(schedule)
        scheduler.commit(schedule, None if is_whole and numbers.random() < 0.5 else found)

    def cancel(self) -> None:
        running = self.scheduler.sequences()
        if running:
            self.scheduler.finish(self.numbers.choice(running), FinishReason.CANCELLED)

    def audit(self) -> None:
        """What the table says of every sequence follows from what is known and what is in flight."""
        table, scheduler = self.table, self.scheduler
        assert scheduler.audit() == []
        owners = {int(number) for number in table.owner if number >= 0}
        assert owners == {s.number for s in scheduler.sequences() if s.row >= 0}
        for sequence in scheduler.sequences():
            row = sequence.row
            if row < 0:
                assert sequence.pages == []
                continue
            pending = uncertain = 0
            for schedule in self.in_flight:
                for place in np.flatnonzero(schedule.numbers == sequence.number).tolist():
                    pending += int(schedule.most_tokens[place])
                    if schedule.max_drafts is not None:
                        uncertain += int(schedule.max_drafts[place])
            assert table.num_pending[row] == pending
            assert table.num_uncertain[row] == uncertain
            assert table.num_tokens[row] - pending == sequence.num_tokens
            computed = int(table.num_computed[row])
            assert 0 <= computed - uncertain <= len(sequence.pages) * PAGE
            assert computed < table.num_tokens[row], "the newest token was not run"
            if not pending:
                assert computed < sequence.num_tokens
            assert table.num_pages[row] == len(sequence.pages)
            assert len(set(sequence.pages)) == len(sequence.pages)
        holders = [s for s in scheduler.sequences() if s.pages]
        for one in holders:
            for other in holders:
                # A shared page holds the same beginning, or a step would overwrite another's keys.
                for place, page in enumerate(one.pages if one is not other else ()):
                    if page in other.pages:
                        assert other.pages.index(page) == place
                        end = (place + 1) * PAGE
                        assert one.token_ids[:end] == other.token_ids[:end]
                        assert len(one.token_ids[:end]) == end, "a shared page is full"


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_table_counts_what_is_known_and_what_is_in_flight(seed: int) -> None:
    run(seed)


def run(seed: int) -> dict[str, int]:
    play = Play(seed)
    left = play.numbers.randint(1, 12)
    while left or play.scheduler.has_work or play.in_flight:
        if left and play.numbers.random() < 0.3:
            play.arrive()
            left -= 1
        elif play.numbers.random() < 0.05:
            play.cancel()
        elif len(play.in_flight) < 2 and play.numbers.random() < 0.7:
            play.schedule()
        elif play.in_flight:
            play.read()
        play.audit()
    assert play.scheduler.allocator.num_held == 0
    assert play.table.num_free_rows == play.table.num_rows
    assert (play.table.pages == SCRATCH).all(), "a free row shows no page to its next owner"
    return play.seen


def test_such_plays_come_to_every_case() -> None:
    """The control: without these cases the test above would say little."""
    total: dict[str, int] = {}
    for seed in range(60):
        for name, count in run(seed).items():
            total[name] = total.get(name, 0) + count
    assert min(total.values()) >= 5, total


def test_abandoned_steps_name_their_sequences_and_leave_no_trace() -> None:
    play = Play(3)
    for _ in range(3):
        play.arrive()
    while len(play.in_flight) < 2:
        play.schedule()
        if play.in_flight and not play.scheduler.may_run_prompts:
            play.schedule()
        elif play.in_flight:
            play.read()
    scheduled = {int(n) for schedule in play.in_flight for n in schedule.numbers}
    abandoned = set(play.scheduler.abandon())
    assert abandoned == scheduled
    for number in abandoned:
        play.scheduler.finish(play.sequences[number], FinishReason.CANCELLED)
    play.in_flight.clear()
    play.audit()


@pytest.mark.parametrize("accepted", range(5))
def test_rejected_drafts_are_taken_back(accepted: int) -> None:
    scheduler = Scheduler(Limits(1, 30, LONGEST, PAGE), SharedPages(20))
    request = Request(0, (1, 2, 3), SamplingParams(temperature=0.0), 0, LONGEST)
    sequence = Sequence(request, [1, 2, 3], [root_hash(_IDENTITY)])
    scheduler.add(sequence)
    table = scheduler.table
    prompt = scheduler.schedule(4)
    assert prompt is not None
    first = scheduler.schedule(4)
    assert first is not None
    assert first.max_drafts is not None
    assert (first.starts.tolist(), first.max_drafts.tolist()) == ([3], [4])
    second = scheduler.schedule(4)
    assert second is not None
    assert second.limits is not None
    assert (second.starts.tolist(), table.num_uncertain.tolist()) == ([8], [8])
    assert second.limits.tolist() == [min(LONGEST - 1, len(sequence.pages) * PAGE)]
    scheduler.append(sequence, 5)
    scheduler.commit(prompt)
    for _ in range(1 + accepted):
        scheduler.append(sequence, 6)
    scheduler.commit(first, np.array([1 + accepted]))
    # The second step started behind the accepted drafts; all of its own may still be accepted.
    assert table.num_computed[0] == 4 + accepted + 5
    assert table.num_tokens[0] == 5 + accepted + 5
    assert (table.num_pending[0], table.num_uncertain[0]) == (5, 4)
    scheduler.append(sequence, 7)
    scheduler.commit(second, np.array([1]))
    assert table.num_computed[0] == 5 + accepted == sequence.num_tokens - 1
    assert (table.num_pending[0], table.num_uncertain[0]) == (0, 0)
    assert scheduler.audit() == []
