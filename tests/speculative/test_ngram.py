"""Prompt lookup drafts what followed the same tokens before."""

from __future__ import annotations

import random

from kvant.speculative.ngram import look_up


def naive(tokens: list[int], count: int, least: int, most: int) -> list[int]:
    """The same, one place after another."""
    for length in range(most, least - 1, -1):
        tail = tokens[len(tokens) - length :]
        places = [
            end
            for end in range(length, len(tokens))
            if length < len(tokens) and tokens[end - length : end] == tail
        ]
        if places:
            full = [end for end in places if end + count <= len(tokens)]
            start = full[-1] if full else places[0]
            return tokens[start : start + count]
    return []


def test_the_longest_repeated_end_decides() -> None:
    tokens = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert look_up(tokens, 2, 1, 4) == [9, 2]  # 1 2 3 agree there, only 2 3 at the later place
    assert look_up(tokens, 2, 1, 2) == [8, 1]


def test_nothing_is_drafted_where_too_few_tokens_repeat() -> None:
    assert look_up([1, 2, 3, 4], 3, 1, 4) == []
    assert look_up([5, 1, 6, 1], 3, 2, 4) == []
    assert look_up([1], 3, 1, 4) == []


def test_a_run_of_one_token_goes_on() -> None:
    assert look_up([4, 7, 7, 7, 7, 7, 7], 3, 2, 3) == [7, 7, 7]


def test_it_finds_what_a_search_place_by_place_finds() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(400):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        least = rng.randint(1, 3)
        most = least + rng.randint(0, 2)
        count = rng.randint(1, 5)
        expected = naive(tokens, count, least, most)
        assert look_up(tokens, count, least, most) == expected, (tokens, count, least, most)
        found += bool(expected)
    assert 100 < found < 400
