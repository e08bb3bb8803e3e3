"""The rule of acceptance keeps the target's distribution for any drafts."""

from __future__ import annotations

import hashlib
from itertools import product

import pytest
import torch

from kvant.sampling.sampler import uniform
from kvant.speculative.accept import verify

DRAWS = 20_000
VOCAB = 4

# Chi-square quantiles at 0.999, by degrees of freedom (NIST handbook, table 1.3.6.7.4).
_CRITICAL = {3: 16.266, 63: 103.442}


def target(context: tuple[int, ...]) -> torch.Tensor:
    """A target's probabilities after some tokens: [VOCAB] float64."""
    seed = int.from_bytes(hashlib.sha256(repr(context).encode()).digest()[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(VOCAB, generator=generator, dtype=torch.float64).softmax(0)


def sampled(seed: int, context: tuple[int, ...]) -> int:
    """The target's own token: the inverse of its distribution at the place's random number."""
    mass = target(context).cumsum(0)
    u = uniform(seed, len(context))
    return min(int(torch.searchsorted(mass, u * mass[-1], right=True)), VOCAB - 1)


def answer(seed: int, drafts: tuple[int, ...], length: int) -> tuple[list[int], int]:
    """A sampled answer of `length` tokens, every step with these drafts; and how many stood."""
    tokens: list[int] = []
    accepted = 0
    while len(tokens) < length:
        before = tuple(tokens)
        chosen = verify(
            drafts,
            lambda place, before=before: sampled(seed, (*before, *drafts[:place])),
            lambda token: token,
        )
        accepted += len(chosen) - 1
        tokens += chosen
    return tokens[:length], accepted


def chi_square(counts: dict[tuple[int, ...], int], length: int) -> float:
    """Against the product of the target's probabilities, over all answers of `length` tokens."""
    total = 0.0
    for tokens in product(range(VOCAB), repeat=length):
        expected = DRAWS * 1.0
        for place in range(length):
            expected *= float(target(tokens[:place])[tokens[place]])
        total += (counts.get(tokens, 0) - expected) ** 2 / expected
    return total


@pytest.mark.parametrize("drafts", [(0, 1), (3,), (2, 2, 2)])
def test_answers_have_the_targets_distribution_over_20000_draws(drafts: tuple[int, ...]) -> None:
    counts: dict[tuple[int, ...], int] = {}
    stood = 0
    for seed in range(DRAWS):
        tokens, accepted = answer(seed, drafts, 3)
        counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
        stood += accepted
    assert stood > DRAWS // 10, "nothing was accepted: the test would say nothing"
    assert chi_square(counts, 3) < _CRITICAL[63]


def test_a_draft_is_accepted_with_the_probability_that_the_target_gives_it() -> None:
    p = target(())
    for draft in range(VOCAB):
        accepted = sum(answer(seed, (draft,), 1)[1] for seed in range(2_000))
        assert accepted / 2_000 == pytest.approx(float(p[draft]), abs=0.04)


def test_a_rejected_draft_is_replaced_by_a_token_of_p_without_it() -> None:
    p, draft = target(()), 1
    counts = dict.fromkeys(range(VOCAB), 0)
    for seed in range(DRAWS):
        tokens, _ = answer(seed, (draft,), 1)
        counts[tokens[0]] += 1
    rejected = DRAWS - counts[draft]
    rest = p.clone()
    rest[draft] = 0
    rest /= rest.sum()
    for token in range(VOCAB):
        if token != draft:
            assert counts[token] / rejected == pytest.approx(float(rest[token]), abs=0.02)


def test_the_same_seed_gives_the_same_answer_with_any_drafts() -> None:
    for seed in range(50):
        plain, _ = answer(seed, (), 6)
        for drafts in ((0,), (1, 2), (3, 3, 3, 3)):
            assert answer(seed, drafts, 6)[0] == plain


def test_it_asks_no_further_than_the_drafts_stand() -> None:
    asked = []

    def choose(place: int) -> int:
        asked.append(place)
        return [7, 8, 1, 4][place]

    assert verify((7, 8, 9), choose, lambda token: token) == [7, 8, 1]
    assert asked == [0, 1, 2]


def test_after_the_last_draft_the_target_adds_one_of_its_own() -> None:
    assert verify((7, 8), lambda place: [7, 8, 5][place], lambda token: token) == [7, 8, 5]
    assert verify((), lambda place: 3, lambda token: token) == [3]


def test_nothing_is_accepted_behind_a_row_that_is_no_numbers() -> None:
    rows = [7, None, 9]
    assert verify((7, 8), lambda place: rows[place], lambda token: token) == [7, None]
