"""The loop with drafts, on a model that reads back what it stored: no answer changes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.errors import EngineFault
from kvant.execution.speculation import Speculation
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason
from kvant.speculative.base import Ask
from kvant.speculative.ngram import NgramProposer
from tests.engine.fakes import EOS, VOCAB, answer
from tests.engine.test_engine import generate, greedy, prompt_of, run
from tests.speculative.scripted import Scripted, fake_engine, speculate

PROMPTS = [prompt_of(length, length) for length in (1, 3, 4, 5, 17, 40)]


def known(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    return [[*prompt, *answer(prompt, num_tokens)] for prompt in prompts]


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 100])
@pytest.mark.parametrize("chunk", [3, 16, 1000])
def test_answers_are_those_without_drafts(wrong_every: int, chunk: int) -> None:
    engine, runner = fake_engine(max_num_batched_tokens=chunk)
    speculate(engine, known(PROMPTS, 20), wrong_every=wrong_every)
    results = generate(engine, PROMPTS, greedy(20))
    assert [list(r.token_ids) for r in results] == [answer(p, 20) for p in PROMPTS]
    assert max(sum(lengths) for lengths in runner.steps) <= chunk
    stats = engine.stats.speculation
    assert stats is not None
    assert stats.num_draft_tokens > 0
    assert (stats.num_accepted_tokens > 0) == (wrong_every > 1)
    if wrong_every < 100:
        assert stats.num_accepted_tokens < stats.num_draft_tokens


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    steps = {}
    for wrong_every in (1, 100):
        engine, _ = fake_engine()
        speculate(engine, known(PROMPTS[:2], 20), wrong_every=wrong_every)
        generate(engine, PROMPTS[:2], greedy(20))
        steps[wrong_every] = engine.stats.num_steps
    assert steps[1] == 20
    assert steps[100] <= 1 + math.ceil(19 / 5)


def test_under_constant_preemption_every_request_ends_with_the_same_answer() -> None:
    prompts = [prompt_of(5 + i % 9, i) for i in range(34)]
    engine, _ = fake_engine(num_pages=33, max_num_seqs=34, max_num_batched_tokens=64)
    speculate(engine, known(prompts, 30))
    results = generate(engine, prompts, greedy(30))
    assert engine.stats.num_preemptions >= 1
    assert [list(r.token_ids) for r in results] == [answer(p, 30) for p in prompts]
    stats = engine.stats.speculation
    assert stats is not None
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_drafts_keep_no_prompt_waiting() -> None:
    """Decodes with all their drafts would fill every step; a prompt that comes then is answered at once."""
    engine, _ = fake_engine(max_num_seqs=8, max_num_batched_tokens=16)
    prompts = [prompt_of(3, i) for i in range(4)]
    speculate(engine, known(prompts, 200), wrong_every=1)
    for prompt in prompts:
        engine.submit(prompt, greedy(200))
    for _ in range(3):
        engine.step()
    late = engine.submit(prompt_of(5, 9), greedy(2))
    seen = [progress.number for _ in range(3) for progress in engine.step()]
    assert late in seen


def test_drafts_preempt_no_request() -> None:
    """Pages for drafts come from what is free; with none to spare there are simply no drafts."""
    counts = []
    for drafting in (False, True):
        engine, _ = fake_engine(num_pages=25, max_num_seqs=4, max_num_batched_tokens=64)
        prompts = [prompt_of(9, i) for i in range(4)]
        if drafting:
            speculate(engine, known(prompts, 14), wrong_every=1)
        generate(engine, prompts, greedy(14))
        counts.append(engine.stats.num_preemptions)
    assert counts[0] == counts[1] == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_any_mixture_ends_in_the_answers_without_drafts(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [prompt_of(rng.randint(1, 40), rng.randrange(6)) for _ in range(rng.randint(1, 8))]
    tokens = rng.randint(1, 25)
    engine, _ = fake_engine(
        num_pages=rng.randint(20, 60), max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(1, 64), prefix_caching=rng.random() < 0.7,
    )  # fmt: skip
    speculate(
        engine, known(prompts, tokens), most=rng.randint(1, 7), wrong_every=rng.randint(1, 6),
        adaptive=rng.random() < 0.5,
    )  # fmt: skip
    results = generate(engine, prompts, greedy(tokens))
    assert [list(r.token_ids) for r in results] == [answer(p, tokens) for p in prompts]
    assert all(len(r.token_ids) == tokens for r in results)
    assert engine.stats.num_held_pages == 0


def test_an_end_within_the_drafts_ends_the_answer_there() -> None:
    prompts = [p for i in range(400) if 2 < len(answer(p := prompt_of(6, i), 40, eos=EOS)) < 40]
    engine, _ = fake_engine()
    speculate(engine, known(prompts[:4], 60), wrong_every=100)
    results = generate(engine, prompts[:4], greedy(40, ignore_eos=False))
    assert [list(r.token_ids) for r in results] == [answer(p, 40, eos=EOS) for p in prompts[:4]]
    assert {r.finish_reason for r in results} == {FinishReason.STOP}


def test_cancelling_between_steps_leaves_others_and_pages_in_order() -> None:
    engine, _ = fake_engine()
    speculate(engine, known(PROMPTS, 20))
    numbers = [engine.submit(prompt, greedy(20)) for prompt in PROMPTS]
    for _ in range(4):
        engine.step()
        engine.audit()
    for number in numbers[::2]:
        engine.cancel(number)
    engine.audit()
    results = run(engine)
    for number, prompt in zip(numbers[1::2], PROMPTS[1::2], strict=True):
        if number in results:
            assert list(results[number].token_ids) == answer(prompt, 20)
    assert engine.stats.num_held_pages == 0


def test_a_row_that_is_no_numbers_is_never_accepted() -> None:
    """The answer ends where plain decoding would end, with any drafts behind that place."""
    prompt = prompt_of(5)
    full = [*prompt, *answer(prompt, 12)]
    engine, runner = fake_engine()
    runner.poison = lambda context: context == full[: len(prompt) + 6]
    speculate(engine, [full], most=7, wrong_every=100)
    (result,) = generate(engine, [prompt], greedy(12))
    assert result.finish_reason is FinishReason.NUMERICAL_ERROR
    assert list(result.token_ids) == full[len(prompt) : len(prompt) + 6]


def test_a_poisoned_row_behind_a_rejected_draft_harms_no_answer() -> None:
    prompt = prompt_of(5)
    full = [*prompt, *answer(prompt, 12)]
    engine, runner = fake_engine()
    runner.poison = lambda context: context != full[: len(context)]
    speculate(engine, [full], most=7, wrong_every=4)
    (result,) = generate(engine, [prompt], greedy(12))
    assert list(result.token_ids) == full[len(prompt) :]


def test_steps_go_on_without_drafts_where_none_stands() -> None:
    engine, _ = fake_engine()
    proposer = speculate(engine, [], wrong_every=1, adaptive=True)
    generate(engine, PROMPTS, greedy(30))
    assert 0 < len(proposer.num_asks) < engine.stats.num_steps


def test_a_failing_proposer_ends_its_requests_and_not_the_engine() -> None:
    engine, _ = fake_engine()
    proposer = speculate(engine, known(PROMPTS, 20))
    numbers = [engine.submit(prompt, greedy(20)) for prompt in PROMPTS[:2]]
    engine.step()
    proposer.propose = lambda asks: [[VOCAB] for _ in asks]  # type: ignore[method-assign]
    with pytest.raises(EngineFault, match="Scripted"):
        run(engine)
    assert not engine.has_work
    engine.audit()
    assert engine.cancel(numbers[0]) is None
    del proposer.propose
    assert list(generate(engine, PROMPTS[:1], greedy(4))[0].token_ids) == answer(PROMPTS[0], 4)


def test_prompt_lookup_repeats_what_stood_there() -> None:
    """The fake model's answers do not repeat, a prompt does: its drafts are tried and rejected."""
    engine, _ = fake_engine(num_pages=200)
    engine.speculation = Speculation(NgramProposer(1, 3), 3, VOCAB, adaptive=False)
    prompt = [5, 6, 7, 8] * 6
    (result,) = generate(engine, [prompt], greedy(60))
    assert list(result.token_ids) == answer(prompt, 60)
    stats = engine.stats.speculation
    assert stats is not None
    assert stats.num_draft_tokens > stats.num_accepted_tokens


def test_sampling_with_a_seed_gives_the_same_tokens_with_drafts() -> None:
    params = SamplingParams(temperature=0.3, top_k=5, seed=11, max_tokens=25, ignore_eos=True)
    plain = generate(fake_engine()[0], PROMPTS, params)
    engine, _ = fake_engine()
    speculate(engine, [[*r.prompt_token_ids, *r.token_ids] for r in plain])
    results = generate(engine, PROMPTS, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    stats = engine.stats.speculation
    assert stats is not None
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_counters_add_up() -> None:
    engine, _ = fake_engine()
    speculate(engine, known(PROMPTS, 20), most=3)
    generate(engine, PROMPTS, greedy(20))
    stats = engine.stats.speculation
    assert stats is not None
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_drafts
    assert 1 < stats.mean_acceptance_length <= 4
    assert stats.acceptance_rate == stats.num_accepted_tokens / stats.num_draft_tokens


def test_a_proposer_is_asked_for_no_more_than_can_be_used() -> None:
    engine, _ = fake_engine()
    asked: list[tuple[int, int, int]] = []  # tokens known, drafts wanted, places in its pages

    class Listening(Scripted):
        def propose(self, asks: list[Ask]) -> list[list[int]]:  # type: ignore[override]
            asked.extend((len(a.token_ids), a.num_tokens, 4 * len(a.pages)) for a in asks)
            return super().propose(asks)

    prompt = PROMPTS[3]
    proposer = Listening(known([prompt], 9), VOCAB, 100)
    engine.speculation = Speculation(proposer, 5, VOCAB, adaptive=False)
    generate(engine, [prompt], greedy(9))
    assert asked
    for known_tokens, wanted, places in asked:
        assert known_tokens + wanted < len(prompt) + 9  # the last token is never run
        assert known_tokens + wanted <= places
