"""Which long stretches of a step are made ready together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvant.attention.base import LongQuery
from kvant.attention.long import together


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(0, 20_000))
def test_neighbours_share_as_much_as_fits_and_all_are_there_once(
    lengths: list[int], at_once: int
) -> None:
    long = [LongQuery(i, 0, 1, length) for i, length in enumerate(lengths)]
    groups = [list(group) for group in together(long, at_once)]
    assert [one for group in groups for one in group] == long
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        longest = max(one.length for one in group)
        assert len(group) == 1 or len(group) * longest <= at_once
        if following is not None:
            more = max(longest, following[0].length)
            assert (len(group) + 1) * more > at_once


def test_without_room_every_sequence_is_alone() -> None:
    long = [LongQuery(i, 0, 1, 1) for i in range(3)]
    assert [len(group) for group in together(long, 0)] == [1, 1, 1]
