"""Speculation goes on where it is faster by the clock, and steps aside where it is not."""

from __future__ import annotations

from kvant.speculative.adaptive import Adaptive

Result = tuple[int, float]
"""Tokens and seconds of a step."""


def run(
    adaptive: Adaptive, num_steps: int, ways: dict[int, Result], *, num_sequences: int = 1
) -> list[int]:
    """Steps that give what `ways` says of their number of drafts; those numbers."""
    chosen = []
    for _ in range(num_steps):
        num_drafts = adaptive.choose(num_sequences, list(ways))
        tokens, seconds = ways[num_drafts]
        adaptive.note(num_sequences, tokens, seconds, num_drafts=num_drafts)
        chosen.append(num_drafts)
    return chosen


def test_it_goes_on_where_drafts_pay() -> None:
    chosen = run(Adaptive(), 200, {7: (4, 0.02), 0: (1, 0.01)})
    assert chosen.count(7) > 180


def test_it_steps_aside_where_they_do_not() -> None:
    chosen = run(Adaptive(), 200, {7: (4, 0.05), 0: (1, 0.01)})
    assert chosen.count(7) < 20


def test_of_several_numbers_of_drafts_the_fastest_goes_on() -> None:
    chosen = run(Adaptive(), 400, {15: (6, 0.04), 7: (5, 0.02), 3: (3, 0.015), 0: (1, 0.01)})
    assert chosen.count(7) > 340
    assert set(chosen[50:]) == {0, 3, 7, 15}, "the others are tried again"


def test_the_slower_way_is_tried_again_and_a_change_is_noticed() -> None:
    adaptive = Adaptive()
    run(adaptive, 60, {7: (1, 0.02), 0: (1, 0.01)})
    assert not adaptive.choose(1, [7, 0])
    later = run(adaptive, 400, {7: (6, 0.02), 0: (1, 0.01)})
    assert later[-200:].count(7) > 180


def test_a_large_batch_is_judged_by_itself() -> None:
    adaptive = Adaptive()
    run(adaptive, 40, {7: (4, 0.02), 0: (1, 0.01)})
    run(adaptive, 40, {7: (60, 0.4), 0: (32, 0.05)}, num_sequences=32)
    assert adaptive.choose(1, [7, 0]) == 7
    assert adaptive.choose(32, [7, 0]) == 0


def test_every_way_is_measured_before_one_is_chosen() -> None:
    chosen = run(Adaptive(), 15, {0: (1, 0.01), 15: (4, 0.02), 7: (4, 0.02)})
    assert chosen == [15] * 5 + [7] * 5 + [0] * 5


def test_the_step_after_the_next_one_is_known() -> None:
    adaptive = Adaptive()
    chosen, said = [], []
    for number in range(300):
        way = adaptive.choose(1, [7, 0])
        said.append(adaptive.goes_on(1))
        adaptive.note(1, 2 if way else 1 + number % 3, 0.01, num_drafts=way)
        chosen.append(way)
    assert all(a == b for a, b, same in zip(chosen, chosen[1:], said, strict=False) if same)
    assert sum(said) > 250


def test_a_number_that_cannot_be_had_any_more_is_left() -> None:
    adaptive = Adaptive()
    run(adaptive, 50, {7: (4, 0.02), 0: (1, 0.01)})
    assert adaptive.choose(1, [0]) == 0
