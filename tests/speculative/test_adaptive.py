"""Speculation goes on where it is faster by the clock, and steps aside where it is not."""

from __future__ import annotations

from kvant.speculative.adaptive import Adaptive


def run(
    adaptive: Adaptive, num_steps: int, *, drafting: tuple[int, float], plain: tuple[int, float],
    num_sequences: int = 1,
) -> list[bool]:  # fmt: skip
    """Steps that give (tokens, seconds) by their way; which of them had drafts."""
    ways = []
    for _ in range(num_steps):
        drafted = adaptive.drafts(num_sequences)
        tokens, seconds = drafting if drafted else plain
        adaptive.note(num_sequences, tokens, seconds, drafted=drafted)
        ways.append(drafted)
    return ways


def test_it_goes_on_where_drafts_pay() -> None:
    ways = run(Adaptive(), 200, drafting=(4, 0.02), plain=(1, 0.01))
    assert sum(ways) > 180


def test_it_steps_aside_where_they_do_not() -> None:
    ways = run(Adaptive(), 200, drafting=(4, 0.05), plain=(1, 0.01))
    assert sum(ways) < 20


def test_the_slower_way_is_tried_again_and_a_change_is_noticed() -> None:
    adaptive = Adaptive()
    run(adaptive, 100, drafting=(1, 0.02), plain=(1, 0.01))
    assert not adaptive.drafts(1)
    later = run(adaptive, 400, drafting=(6, 0.02), plain=(1, 0.01))
    assert sum(later[-200:]) > 180


def test_a_large_batch_is_judged_by_itself() -> None:
    adaptive = Adaptive()
    run(adaptive, 40, drafting=(4, 0.02), plain=(1, 0.01))
    run(adaptive, 40, drafting=(60, 0.4), plain=(32, 0.05), num_sequences=32)
    assert adaptive.drafts(1)
    assert not adaptive.drafts(32)


def test_both_ways_are_measured_before_one_is_chosen() -> None:
    ways = run(Adaptive(), 8, drafting=(4, 0.02), plain=(1, 0.01))
    assert ways == [True] * 4 + [False] * 4
