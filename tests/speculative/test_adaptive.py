"""Speculation goes on where it is faster by the clock, and steps aside where it is not."""

from __future__ import annotations

import random

from kvant.speculative.adaptive import Adaptive

Result = tuple[int, float]
"""New tokens of each sequence, and seconds, of a step."""


def run(
    adaptive: Adaptive, num_steps: int, ways: dict[int, Result], *, num_sequences: int = 1
) -> list[int]:
    """Steps that give what `ways` says of their number of drafts; those numbers."""
    chosen = []
    for _ in range(num_steps):
        num_drafts = adaptive.choose(num_sequences, list(ways))
        tokens, seconds = ways[num_drafts]
        adaptive.note([tokens] * num_sequences, seconds, num_drafts=num_drafts)
        chosen.append(num_drafts)
    return chosen


def test_it_goes_on_where_drafts_pay() -> None:
    chosen = run(Adaptive(), 200, {7: (4, 0.02), 0: (1, 0.01)})
    assert chosen.count(7) > 180


def test_it_steps_aside_where_they_do_not() -> None:
    chosen = run(Adaptive(), 200, {7: (4, 0.05), 0: (1, 0.01)})
    assert chosen.count(7) < 20


def test_of_several_numbers_of_drafts_the_fastest_goes_on_however_they_scatter() -> None:
    seconds = {15: 0.018, 7: 0.010, 3: 0.0095, 0: 0.006}
    for seed in range(10):
        rng = random.Random(seed)
        adaptive = Adaptive()
        chosen = []
        for _ in range(400):
            num_drafts = adaptive.choose(1, list(seconds))
            stood = 0
            while stood < num_drafts and rng.random() < 0.857:
                stood += 1
            adaptive.note([1 + stood], seconds[num_drafts], num_drafts=num_drafts)
            chosen.append(num_drafts)
        assert chosen.count(7) > 300
        assert set(chosen[20:]) == {0, 3, 7, 15}, "the others are tried again"


def test_the_slower_way_is_tried_again_and_a_change_is_noticed() -> None:
    adaptive = Adaptive()
    run(adaptive, 60, {7: (1, 0.02), 0: (1, 0.01)})
    assert not adaptive.choose(1, [7, 0])
    later = run(adaptive, 800, {7: (6, 0.02), 0: (1, 0.01)})
    assert later[-200:].count(7) > 180


def test_a_large_batch_is_judged_by_itself() -> None:
    adaptive = Adaptive()
    run(adaptive, 40, {7: (4, 0.02), 0: (1, 0.01)})
    run(adaptive, 40, {7: (2, 0.4), 0: (1, 0.05)}, num_sequences=32)
    assert adaptive.choose(1, [7, 0]) == 7
    assert adaptive.choose(32, [7, 0]) == 0


def test_every_way_is_measured_before_one_is_chosen() -> None:
    chosen = run(Adaptive(), 12, {0: (1, 0.01), 15: (4, 0.02), 7: (4, 0.02)})
    assert chosen == [15] * 4 + [7] * 4 + [0] * 4


def test_a_step_that_is_noted_after_the_next_one_was_chosen_counts_for_its_own_way() -> None:
    """One step is in flight: every step is chosen before the step before it is read."""
    ways = {15: (5, 0.05), 7: (4, 0.02), 0: (1, 0.01)}
    adaptive = Adaptive()
    chosen: list[int] = []
    for _ in range(400):
        chosen.append(adaptive.choose(1, list(ways)))
        for read in chosen[-2:-1]:
            tokens, seconds = ways[read]
            adaptive.note([tokens], seconds, num_drafts=read)
    assert chosen[:12] == [15] * 4 + [7] * 4 + [0] * 4
    assert chosen.count(7) > 340
    assert set(chosen[20:]) == {0, 7, 15}, "the others are tried again"


def test_a_number_that_cannot_be_had_any_more_is_left() -> None:
    adaptive = Adaptive()
    run(adaptive, 50, {7: (4, 0.02), 0: (1, 0.01)})
    assert adaptive.choose(1, [0]) == 0


def test_a_first_step_that_waits_for_another_way_does_not_count() -> None:
    adaptive = Adaptive()
    before = -1
    chosen = []
    for _ in range(400):
        way = adaptive.choose(1, [7, 0])
        seconds = 0.02 if way else 0.01
        adaptive.note([3 if way else 1], seconds * (5 if way != before else 1), num_drafts=way)
        before = way
        chosen.append(way)
    assert chosen.count(7) > 360
