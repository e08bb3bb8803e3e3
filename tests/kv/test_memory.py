"""Bytes to pages to tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.errors import BadValue
from kvant.kv.memory import num_pages, parse_size, size_argument


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("80 GB", 80 * 10**9), ("1048576", 2**20), ("0.5MiB", 2**19), ("1k", 1000),
     ("3 tib", 3 * 2**40), ("7b", 7)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, asked_by="--memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 XB", "0", "1e9", "two"])
def test_malformed_sizes_are_refused_by_flag(text: str) -> None:
    with pytest.raises(BadValue, match="--memory"):
        parse_size(text, asked_by="--memory")


@given(st.integers(-(10**12), 10**13), st.integers(1, 10**9))
def test_pages_fit_and_one_more_would_not(budget: int, page: int) -> None:
    pages = num_pages(budget, page)
    if pages:
        assert pages * page <= budget < (pages + 1) * page
        assert pages >= 2  # the scratch page, and one to use
    else:
        assert budget < 2 * page


@given(st.integers(1, 1 << 50))
def test_a_size_for_the_command_line_is_little_more_than_needed(size: int) -> None:
    read = parse_size(size_argument(size), asked_by="test")
    assert size <= read <= size + max(0, size // 10)


def test_sizes_for_the_command_line_have_units() -> None:
    sizes = (9, 1474560, 773444832107)
    assert [size_argument(size) for size in sizes] == ["9", "1440KiB", "721GiB"]
