"""The search finds what trying everything finds."""

from __future__ import annotations

import itertools

from hypothesis import assume, given
from hypothesis import strategies as st

from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.measure.tuning.search import (
    Assignment,
    LayerOption,
    Option,
    Place,
    best_within,
    best_without_one,
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


layer_problems = st.lists(
    st.tuples(st.lists(option, min_size=1, max_size=3), st.lists(option, min_size=1, max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip


@given(layer_problems, st.integers(8, 96))
def test_one_format_of_a_side_is_avoided_at_the_least_cost(
    found: list[tuple[list[Option], list[Option]]], budget: int
) -> None:
    layers = {
        index: [LayerOption({Side.K: k, Side.V: v}) for k, v in itertools.product(*sides)]
        for index, sides in enumerate(found)
    }
    first = best_within(layers, budget)
    assume(first is not None)
    assert first is not None
    every = [
        Assignment(dict(zip(layers, one, strict=True)))
        for one in itertools.product(*layers.values())
    ]
    others = best_without_one(layers, first, budget)
    for side in Side:
        used = {one.sides[side].dtype for one in first.chosen.values()}
        for dtype in used:
            costs = [
                one.sides[side].kl
                for one in first.chosen.values()
                if one.sides[side].dtype is dtype
            ]
            left = [
                one.kl
                for one in every
                if one.bytes <= budget
                and all(way.sides[side].dtype is not dtype for way in one.chosen.values())
            ]
            if not left or not any(costs):
                assert (side, dtype) not in others
                continue
            other = others[side, dtype]
            assert other.bytes <= budget
            assert all(way.sides[side].dtype is not dtype for way in other.chosen.values())
            assert abs(other.kl - min(left)) < 1e-9


def test_a_format_with_more_bytes_and_no_less_kl_drops_out() -> None:
    small, equal, good, large = (
        Option(FORMATS[0], 4, 0.5),
        Option(FORMATS[1], 8, 0.5),
        Option(FORMATS[2], 8, 0.1),
        Option(FORMATS[3], 16, 0.2),
    )
    assert not_beaten([large, equal, good, small]) == [small, good]
