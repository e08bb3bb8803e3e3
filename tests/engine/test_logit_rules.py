"""Every rule against its definition, written down naively; and rows behind drafts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from kvant.sampling.logit_rules import LogitRules, make_rules
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import Request, Sequence
from tests.engine.fakes import EOS, VOCAB, finish, logits, make_engine
from tests.engine.sampling import ruled, sample, sampler_of

_SIZE = 12
_TOKENS = st.lists(st.integers(0, _SIZE - 1), max_size=12)


def rules_of(
    params: SamplingParams, prompt: list[int], words: list[tuple[int, ...]] | None = None
) -> LogitRules:
    return LogitRules(
        params, prompt, ends=[EOS, *params.stop_token_ids], bad_words=words or [], grammar=None
    )


def by_definition(
    row: list[float],
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    words: list[tuple[int, ...]],
) -> list[float]:
    """One token after another, as the documentation of SamplingParams says it."""
    found = []
    for token, logit in enumerate(row):
        x = logit
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x = -math.inf
        for word in words:
            tail = output[len(output) - len(word) + 1 :] if len(word) > 1 else []
            if len(output) >= len(word) - 1 and (*tail, token) == word:
                x = -math.inf
        x += dict(params.bias_pairs).get(token, 0.0)
        if len(output) < params.min_tokens and token in (EOS, *params.stop_token_ids):
            x = -math.inf
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token)
        x -= params.presence_penalty * (token in output)
        found.append(x)
    return found


@st.composite
def _cases(draw: st.DrawFn) -> dict[str, Any]:
    number = st.sampled_from([-2.0, -0.5, 0.0, 0.7, 2.0])
    return {
        "params": SamplingParams(
            presence_penalty=draw(number),
            frequency_penalty=draw(number),
            repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3])),
            logit_bias=draw(st.dictionaries(st.integers(0, _SIZE - 1), number, max_size=3)),
            allowed_token_ids=draw(
                st.none() | st.lists(st.integers(0, _SIZE - 1), min_size=1, max_size=9)
            ),
            min_tokens=draw(st.integers(0, 12)),
            stop_token_ids=draw(st.sampled_from([(), (5,)])),
            max_tokens=None,
        ),
        "prompt": draw(_TOKENS),
        "output": draw(_TOKENS),
        "words": draw(
            st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4)
        ),
    }


@settings(max_examples=300, deadline=None)
@given(case=_cases(), seed=st.integers(0, 1000))
def test_rules_do_what_their_definition_says_token_by_token(
    case: dict[str, Any], seed: int
) -> None:
    row = torch.randn(_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    rules = rules_of(case["params"], case["prompt"], case["words"])
    for token in case["output"]:
        rules.advance(token)
    expected = by_definition(row.tolist(), **case)
    before = row.clone()
    assert ruled(rules, row).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert torch.equal(row, before)


def words_tokenizer() -> Tokenizer:
    """Letters are tokens, and so are letters behind a space."""
    vocab = {chr(ord("a") + i): 10 + i for i in range(26)}
    vocab |= {f"\u0120{chr(ord('a') + i)}": 40 + i for i in range(26)}
    vocab |= {"\u0120": 9}
    merges = [("\u0120", chr(ord("a") + i)) for i in range(26)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_bad_words_are_banned_at_a_texts_beginning_and_behind_a_space() -> None:
    params = SamplingParams(bad_words=["ab", "c"])
    rules = make_rules(params, [1], eos_token_ids=(EOS,), tokenizer=words_tokenizer())
    assert rules is not None

    def banned() -> set[int]:
        row = ruled(rules, torch.zeros(VOCAB))
        return {i for i, x in enumerate(row.tolist()) if x == -math.inf}

    a, b, c, spaced_a, spaced_c = 10, 11, 12, 40, 42
    assert banned() == {c, spaced_c}
    rules.advance(a)
    assert banned() == {b, c, spaced_c}
    rules.advance(a + 5)
    assert banned() == {c, spaced_c}
    rules.advance(spaced_a)
    assert banned() == {b, c, spaced_c}


def test_bad_words_never_appear_in_an_answer() -> None:
    tokenizer = words_tokenizer()
    free, _ = make_engine(tokenizer=tokenizer)
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    (*_, last) = free.stream(free.submit([1, 2], SamplingParams(**params)))
    assert last.result is not None
    words = [tokenizer.decode([t]) for t in last.result.token_ids[:40] if 10 <= t < 36]
    assert words, "the control: without the rule they do appear"
    engine, _ = make_engine(tokenizer=tokenizer)
    (*_, last) = engine.stream(engine.submit([1, 2], SamplingParams(bad_words=words, **params)))
    assert last.result is not None
    assert not any(word in last.result.text for word in words)


def test_without_rules_there_is_no_object_and_greedy_rows_are_not_touched() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0, stop_token_ids=[5], logprobs=2)):
        assert make_rules(params, [1], eos_token_ids=(EOS,), tokenizer=None) is None


def _sequence(params: SamplingParams, output: list[int]) -> Sequence:
    request = Request(0, (1, 2), params, 7, 10_000)
    found = Sequence(request, [1, 2, *output], [b""])
    found.rules = make_rules(params, (1, 2), eos_token_ids=(EOS,), tokenizer=None)
    for token in output:
        if found.rules is not None:
            found.rules.advance(token)
    return found


@settings(max_examples=60, deadline=None)
@given(
    output=st.lists(st.integers(4, VOCAB - 1), max_size=6),
    ahead=st.lists(st.integers(4, VOCAB - 1), max_size=5),
    temperature=st.sampled_from([0.0, 1.0, 2.5]),
    penalty=st.sampled_from([0.0, 2.0]),
)
def test_a_row_beyond_a_draft_gets_the_token_it_gets_when_it_is_reached_one_by_one(
    output: list[int], ahead: list[int], temperature: float, penalty: float
) -> None:
    params = SamplingParams(
        temperature=temperature, frequency_penalty=penalty, min_tokens=8, logprobs=1, top_k=20
    )
    row = logits([*output, *ahead])
    here, there = _sequence(params, output), _sequence(params, output + ahead)
    rows = sampler_of(row[None], [(0, here, len(ahead))])
    for token in ahead:  # the drafts stand
        here.token_ids.append(token)
        assert here.rules is not None
        here.rules.advance(token)
    assert rows.sample(0) == sample(row[None], [there])[0]


def test_a_request_whose_rules_leave_nothing_is_refused_and_its_neighbours_go_on() -> None:
    engine, _ = make_engine()
    alone, _ = make_engine()
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [p.token_ids for p in alone.stream(alone.submit([5, 6], greedy))]
    number = engine.submit([5, 6], greedy)
    impossible = engine.submit(
        [5, 6], SamplingParams(allowed_token_ids=[EOS], min_tokens=3, max_tokens=6)
    )
    results = finish(engine)
    assert results[impossible].finish_reason == "refused"
    assert results[impossible].error is not None
    assert [(t,) for t in results[number].token_ids] == expected


def test_each_answer_has_only_tokens_that_its_own_rules_allow_in_any_batch() -> None:
    """Each request may use one token of its own; they come, go, are cancelled and preempted."""
    engine, _ = make_engine(num_pages=20, max_num_seqs=16, max_num_batched_tokens=24)
    own: dict[int, int] = {}
    ended = 0
    draw = torch.Generator().manual_seed(5)

    def dice(n: int) -> int:
        return int(torch.randint(n, (), generator=draw))

    for index in range(400):
        token = 4 + index % 90
        prompt = [4 + dice(90) for _ in range(1 + dice(9))]
        how = ({"logit_bias": {token: 100.0}}, {"allowed_token_ids": [token]})[dice(2)]
        params = SamplingParams(
            temperature=dice(2) * 1.0,
            frequency_penalty=float(dice(2)),
            max_tokens=1 + dice(12),
            **how,
        )
        own[engine.submit(prompt, params)] = token
        if index % 4:
            continue
        for progress in engine.step():
            assert set(progress.token_ids) <= {own[progress.number]}
            ended += progress.result is not None
        if dice(5) == 0:
            engine.cancel(max(own) - dice(3))
    while engine.has_work:
        for progress in engine.step():
            assert set(progress.token_ids) <= {own[progress.number]}
            ended += progress.result is not None
    assert engine.stats.num_preemptions > 0
    assert ended > 350


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rules_do_not_hide_logits_that_are_no_numbers(bad: float) -> None:
    rows: Tensor = torch.zeros(2, VOCAB)
    rows[0, 50] = bad
    sequence = _sequence(SamplingParams(allowed_token_ids=[7]), [])
    first, second = sample(rows, [sequence, sequence])
    assert (first.token_id, first.error) == (None, None)
    assert second.token_id == 7
