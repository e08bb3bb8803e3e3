"""n answers to one prompt: each its own seed, the prompt computed once."""

from __future__ import annotations

from typing import Any

import pytest

from kvant.engine.result import Result
from kvant.errors import RequestError
from kvant.sampling.sampling_params import SamplingParams, seed_of_choice
from tests.engine.fakes import make_engine

PROMPT = [4 + i for i in range(41)]


def run(engine: Any) -> dict[int, Result]:
    found = {}
    while engine.has_work:
        for progress in engine.step():
            if progress.result is not None:
                found[progress.number] = progress.result
    return found


def test_choice_i_is_what_a_request_with_seed_plus_i_gets() -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=9, ignore_eos=True, logprobs=1)
    engine, _ = make_engine()
    numbers = engine.submit_choices(PROMPT, params)
    found = run(engine)
    answers = [found[number].token_ids for number in numbers]
    assert len(set(answers)) == 4
    for index, answer in enumerate(answers):
        alone, _ = make_engine()
        single = SamplingParams(seed=11 + index, max_tokens=9, ignore_eos=True)
        number = alone.submit(PROMPT, single)
        assert run(alone)[number].token_ids == answer


def test_seeds_of_choices_wrap_and_unseeded_choices_differ() -> None:
    assert seed_of_choice(2**63 - 1, 1) == -(2**63)
    assert [one.seed for one in SamplingParams(n=3, seed=2**63 - 2).choices()] == [
        2**63 - 2, 2**63 - 1, -(2**63)
    ]  # fmt: skip
    engine, _ = make_engine()
    numbers = engine.submit_choices(PROMPT, SamplingParams(n=3, max_tokens=9, ignore_eos=True))
    found = run(engine)
    assert len({found[number].token_ids for number in numbers}) == 3


@pytest.mark.parametrize("budget", [7, 32, 1000])
def test_the_prompts_full_pages_are_computed_once_for_all_choices(budget: int) -> None:
    engine, runner = make_engine(max_num_batched_tokens=budget)
    numbers = engine.submit_choices(PROMPT, SamplingParams(n=5, max_tokens=1))
    found = run(engine)
    assert [found[number].num_cached_tokens for number in numbers] == [0, 40, 40, 40, 40]
    assert runner.num_run_tokens == len(PROMPT) + 4


def test_requests_that_share_little_do_not_wait_for_each_other() -> None:
    engine, runner = make_engine(max_num_batched_tokens=1000, num_pages=200)
    for index in range(4):
        engine.submit([*PROMPT[:12], *[50 + index] * 20], SamplingParams(max_tokens=1))
    run(engine)
    assert runner.steps[0] == [32] * 4


def test_without_a_prefix_cache_all_choices_start_at_once_and_are_right() -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    with_cache, _ = make_engine()
    without, runner = make_engine(prefix_caching=False, max_num_batched_tokens=1000)
    numbers = with_cache.submit_choices(PROMPT, params)
    found = run(with_cache)
    expected = [found[number].token_ids for number in numbers]
    numbers = without.submit_choices(PROMPT, params)
    found = run(without)
    assert [found[number].token_ids for number in numbers] == expected
    assert runner.steps[0] == [41] * 3


def test_choices_go_on_when_the_one_they_wait_for_is_cancelled() -> None:
    engine, _ = make_engine(max_num_batched_tokens=7)
    first, *others = engine.submit_choices(PROMPT, SamplingParams(n=3, max_tokens=2))
    engine.step()
    engine.cancel(first)
    assert set(run(engine)) == set(others)


def test_only_the_first_choice_reads_the_prompt() -> None:
    engine, _ = make_engine()
    params = SamplingParams(n=3, prompt_logprobs=1, max_tokens=2)
    numbers = engine.submit_choices(PROMPT, params)
    found = run(engine)
    assert [found[n].prompt_logprobs is not None for n in numbers] == [True, False, False]
    assert [found[n].num_cached_tokens for n in numbers] == [0, 40, 40]


def test_one_number_is_one_answer() -> None:
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="this call gives one answer"):
        engine.submit(PROMPT, SamplingParams(n=2))
    with pytest.raises(RequestError, match="n must be 1"):
        SamplingParams(n=2, max_tokens=0, prompt_logprobs=1)
