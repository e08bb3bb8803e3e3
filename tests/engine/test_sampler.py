"""Tokens are chosen exactly, from the request's own numbers alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvant.sampling.logit_rules import make_rules
from kvant.sampling.sampler import FEW, Draw, Sampled, parts_for, uniform, uniforms
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import Request, Sequence
from tests.engine.fakes import make_engine
from tests.engine.sampling import sample


def sequence(params: SamplingParams, *, seed: int = 1, num_output: int = 0) -> Sequence:
    request = Request(0, (1, 2), params, seed, 10_000)
    found = Sequence(request, [1, 2] + [0] * num_output, [b""])
    found.rules = make_rules(params, (1, 2), eos_token_ids=(1,), tokenizer=None)
    return found


def tokens(row: Tensor, params: SamplingParams, count: int) -> list[int]:
    """`count` draws from one row of logits, at the places 0 .. count - 1 of one answer."""
    sequences = [sequence(params, num_output=place) for place in range(count)]
    found = [s.token_id for s in sample(row.expand(count, -1), sequences)]
    assert None not in found
    return [token for token in found if token is not None]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=40))
def test_greedy_takes_the_smallest_of_the_likeliest_tokens(values: list[float]) -> None:
    row = torch.tensor([values])
    found = sample(row, [sequence(SamplingParams(temperature=0))])
    assert found[0].token_id == values.index(max(values))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.nan])
def test_a_row_with_nan_or_infinity_has_no_token_and_its_neighbours_have_theirs(bad: float) -> None:
    rows = torch.randn(3, 50)
    rows[1, 17] = bad
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1)):
        found = sample(rows, [sequence(params)] * 3)
        assert found[1] == Sampled(None)
        assert found[0] == sample(rows[:1], [sequence(params)])[0]
        assert found[2] == sample(rows[2:], [sequence(params)])[0]


def test_a_row_of_minus_infinity_has_no_token_and_masked_tokens_are_never_chosen() -> None:
    rows = torch.full((2, 9), -torch.inf)
    rows[1, 4] = 0.0
    found = sample(rows, [sequence(SamplingParams(temperature=3))] * 2)
    assert [s.token_id for s in found] == [None, 4]


def test_draws_follow_the_softmax_of_the_logits() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    for temperature in (0.5, 1.0, 2.0):
        count = 4_000
        drawn = Counter(tokens(row, SamplingParams(temperature=temperature), count))
        expected = (row.double() / temperature).softmax(0) * count
        chi_square = sum((drawn[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
        assert chi_square < 23.5, "p < 0.0001 for 4 degrees of freedom"


def test_the_numbers_drawn_are_uniform_and_differ_by_seed_and_place() -> None:
    draws = [uniform(seed, place) for seed in range(-50, 50) for place in range(100)]
    assert len(set(draws)) == len(draws)
    assert all(0 <= u < 1 for u in draws)
    buckets = Counter(int(u * 20) for u in draws)
    assert sum((buckets[i] - 500) ** 2 / 500 for i in range(20)) < 50
    assert uniform(2**63 - 1, 5) != uniform(-(2**63), 5)
    assert uniform(-3, 77) == 0.7735703475409463
    assert uniforms([-50, 3], [0, 9]).tolist() == [uniform(-50, 0), uniform(3, 9)]


def kept_by_definition(row: Tensor, params: SamplingParams) -> set[int]:
    """The filters as their documentation says them, token by token."""
    x = row.double()
    p = ((x - x.max()) / params.temperature).exp()
    order = sorted(range(len(p)), key=lambda i: (-float(p[i]), i))
    order = [i for i in order if float(p[i]) >= params.min_p * float(p[order[0]])]
    if params.top_k > 0:
        order = order[: params.top_k]
    total = math.fsum(float(p[i]) for i in order)
    kept: list[int] = []
    mass = 0.0
    for i in order:
        if params.top_p < 1.0 and kept and mass >= params.top_p * total * (1 - 1e-12):
            break
        kept.append(i)
        mass += float(p[i])
    return set(kept)


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([5, 300, 1500, 3000]),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
    ties=st.booleans(),
    top_k=st.sampled_from([0, -1, 1, 3, 40, 1024, 1100, 5000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_filters_keep_exactly_what_their_definition_says(
    size: int, spread: float, ties: bool, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    if ties:
        row = (row * 4).round() / 4
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    allowed = kept_by_definition(row, params)
    drawn = set(tokens(row, params, 40))
    assert drawn <= allowed
    if len(allowed) <= 3:
        assert drawn == allowed or min(allowed_share(row, allowed, params)) < 0.2


def allowed_share(row: Tensor, allowed: set[int], params: SamplingParams) -> list[float]:
    weights = (row.double() / params.temperature).softmax(0)
    total = sum(float(weights[i]) for i in allowed)
    return [float(weights[i]) / total for i in allowed]


def test_sorting_the_head_alone_gives_the_tokens_of_sorting_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = (torch.randn(4000, generator=torch.Generator().manual_seed(3)) * 2).bfloat16().float()
    for params in (
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_p=0.9999),
        SamplingParams(top_k=2000, top_p=0.9),
    ):
        fast = tokens(row, params, 40)
        with monkeypatch.context() as patch:
            patch.setattr("kvant.sampling.sampler.HEAD", 10_000)
            patch.setattr("kvant.sampling.sampler.FEW", 0)
            assert tokens(row, params, 40) == fast


def test_logprobs_are_those_of_the_model_for_any_sampled_token() -> None:
    row = torch.randn(1, 30)
    expected = row[0].double().log_softmax(0)
    for params in (
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(temperature=5, top_k=2, logprobs=3),
        SamplingParams(logprobs=0),
    ):
        found = sample(row, [sequence(params)])[0]
        assert found.logprobs is not None
        assert found.logprobs.token_id == found.token_id
        assert found.logprobs.logprob == pytest.approx(float(expected[found.logprobs.token_id]))
        values, ids = expected.topk(params.logprobs or 0)
        assert [i for i, _ in found.logprobs.top] == ids.tolist()
        assert [v for _, v in found.logprobs.top] == pytest.approx(values.tolist())
    assert sample(row, [sequence(SamplingParams())])[0].logprobs is None


def test_sampling_leaves_the_logits_alone() -> None:
    rows = torch.randn(2, 20)
    before = rows.clone()
    params = SamplingParams(top_k=3, min_tokens=5, stop_token_ids=[int(rows[0].argmax())])
    sample(rows, [sequence(params)] * 2)
    assert torch.equal(rows, before)


def test_a_seeded_answer_is_the_same_alone_in_a_crowd_and_after_preemption() -> None:
    params = SamplingParams(temperature=1.5, top_p=0.95, seed=42, max_tokens=25, ignore_eos=True)

    def answers(others: int, num_pages: int, chunk: int) -> tuple[tuple[int, ...], int]:
        engine, _ = make_engine(num_pages=num_pages, max_num_batched_tokens=chunk, seed=others)
        unseeded = SamplingParams(max_tokens=30, ignore_eos=True)
        for i in range(others):
            engine.submit([i, 5, 6], unseeded)
        number = engine.submit([7, 8, 9], params)
        for _ in range(10_000):
            for progress in engine.step():
                if progress.number == number and progress.result is not None:
                    for other in range(others):
                        engine.cancel(other)
                    return progress.result.token_ids, progress.result.num_preemptions
        raise AssertionError("no answer")

    alone, _ = answers(0, 64, 32)
    crowd, _ = answers(6, 64, 5)
    pressed, preemptions = answers(6, 14, 32)
    assert preemptions >= 1
    assert alone == crowd == pressed
    engine, _ = make_engine()
    other = engine.submit([7, 8, 9], SamplingParams(temperature=1.5, top_p=0.95, seed=43))
    assert [p.result for p in engine.stream(other)][-1].token_ids != alone[:16]  # type: ignore[union-attr]


def test_an_engines_seed_makes_unseeded_requests_repeatable() -> None:
    def run(seed: int | None) -> list[tuple[int, ...]]:
        engine, _ = make_engine(seed=seed)
        found = []
        for prompt in ([1], [1], [2]):
            *_, last = engine.stream(engine.submit(prompt, SamplingParams(ignore_eos=True)))
            assert last.result is not None
            found.append(last.result.token_ids)
        return found

    assert run(5) == run(5)
    assert run(5)[0] != run(5)[1], "two requests of one engine drew the same seed"
    assert run(5) != run(6)
    assert run(None) != run(None)


def test_many_rows_at_once_give_the_tokens_of_single_rows() -> None:
    rows = torch.randn(137, 3000, generator=torch.Generator().manual_seed(5)) * 2
    rows[11] = 0.5  # flat: its likeliest tokens settle nothing
    wishes = (
        {}, {"top_p": 0.9}, {"top_k": 7, "min_p": 0.02}, {"top_p": 0.5, "logprobs": 3},
        {"temperature": 0.0, "presence_penalty": 1.5}, {"repetition_penalty": 1.2, "top_k": 2},
        {"logit_bias": {5: 3.0}, "frequency_penalty": 0.3}, {"temperature": 0.0, "logprobs": 2},
    )  # fmt: skip
    sequences = [
        sequence(SamplingParams(**wishes[i % 8]), seed=i, num_output=i)  # type: ignore[arg-type]
        for i in range(len(rows))
    ]
    alone = [sample(rows[i : i + 1], [one])[0] for i, one in enumerate(sequences)]
    assert sample(rows, sequences) == alone


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({}, [False, False, False, True]),
        ({"min_p": 0.1}, [False, False, False, True]),
        ({"top_k": FEW}, [True, False, False, False]),
        ({"top_k": 1, "top_p": 0.9}, [True, False, False, False]),
        ({"top_p": 0.9}, [True, False, True, True]),
        ({"top_k": FEW + 1}, [True, True, False, True]),
        ({"top_k": FEW + 1, "top_p": 0.9}, [True, True, True, True]),
    ],
    ids=str,
)
def test_only_the_parts_of_a_draw_that_a_row_needs_are_launched(
    asked: dict[str, Any], needed: list[bool]
) -> None:
    """A greedy row needs no part of a draw, and does not change what other rows need."""
    rows = [
        Draw(SamplingParams(temperature=heat, **filters), 0.5).numbers
        for heat, filters in ((1.0, asked), (0.0, {"top_k": 900, "top_p": 0.5}))
    ]
    assert parts_for(torch.tensor(rows, dtype=torch.float64)) == needed
