"""The search finds what trying everything finds."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.measure.tuning.search import (
    Assignment,
    Option,
    Place,
    best_within,
    fewest_bytes,
    least_kl,
    not_beaten,
    smallest_under,
)

Options = dict[Place, list[Option]]
FORMATS = list(KVDtype)

option = st.tuples(st.integers(1, 6), st.floats(0, 1)).map(
    lambda found: Option(FORMATS[found[0]], 4 * found[0], found[1])
)
problems = st.lists(st.lists(option, min_size=1, max_size=3), min_size=1, max_size=4).map(
    lambda lists: {(i // 2, list(Side)[i % 2]): found for i, found in enumerate(lists)}
)


def everything(options: Options) -> list[Assignment[Place, Option]]:
    return [
        Assignment(dict(zip(options, one, strict=True)))
        for one in itertools.product(*options.values())
    ]


@given(problems, st.integers(4, 96))
def test_no_assignment_within_the_budget_is_better(options: Options, budget: int) -> None:
    within = [one for one in everything(options) if one.bytes <= budget]
    found = best_within(options, budget)
    if not within:
        assert found is None
        return
    assert found is not None
    assert found.bytes <= budget
    assert found.chosen.keys() == options.keys()
    assert all(found.chosen[place] in options[place] for place in options)
    assert abs(found.kl - min(one.kl for one in within)) < 1e-9


@given(problems, st.floats(0, 4))
def test_no_assignment_that_is_good_enough_is_smaller(options: Options, most: float) -> None:
    enough = [one for one in everything(options) if one.kl <= most]
    found = smallest_under(options, most)
    if not enough:
        assert found is None
        return
    assert found is not None
    assert found.kl <= most
    assert found.bytes == min(one.bytes for one in enough)


@given(problems)
def test_the_ends_of_the_range_are_its_ends(options: Options) -> None:
    every = everything(options)
    assert fewest_bytes(options).bytes == min(one.bytes for one in every)
    assert abs(least_kl(options).kl - min(one.kl for one in every)) < 1e-9


def test_a_format_with_more_bytes_and_no_less_kl_drops_out() -> None:
    small, equal, good, large = (
        Option(FORMATS[0], 4, 0.5),
        Option(FORMATS[1], 8, 0.5),
        Option(FORMATS[2], 8, 0.1),
        Option(FORMATS[3], 16, 0.2),
    )
    assert not_beaten([large, equal, good, small]) == [small, good]
