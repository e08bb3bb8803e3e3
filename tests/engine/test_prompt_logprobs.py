"""Log-probabilities of prompts: right, in bounded memory, for any chunks, hits and memory pressure."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.engine.llm import LLM
from kvant.engine.result import Result
from kvant.errors import RequestError
from kvant.sampling.logprobs import TokenLogprobs
from kvant.sampling.sampler import max_prompt_logprobs, token_logprobs
from kvant.sampling.sampling_params import SamplingParams
from tests.engine.fakes import RememberingRunner, logits, make_engine
from tests.models import tiny


def expected(prompt: list[int], num_top: int) -> list[TokenLogprobs | None]:
    """One context after another, by the definition."""
    found: list[TokenLogprobs | None] = [None]
    for place in range(1, len(prompt)):
        logprobs = logits(prompt[:place]).double().log_softmax(0)
        own = float(logprobs[prompt[place]])
        values, ids = logprobs.topk(num_top)
        rank = int((logprobs > own).sum()) + 1
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        found.append(TokenLogprobs(prompt[place], own, rank, top))
    return found


def same(a: object, b: object) -> bool:
    if not isinstance(a, tuple | list) or not isinstance(b, tuple | list):
        return a == b
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            assert x is y
            continue
        assert (x.token_id, x.rank) == (y.token_id, y.rank)
        assert x.logprob == pytest.approx(y.logprob, abs=1e-9)
        assert [t for t, _ in x.top] == [t for t, _ in y.top]
        assert [v for _, v in x.top] == pytest.approx([v for _, v in y.top], abs=1e-9)
    return True


def results(engine: object) -> dict[int, Result]:
    found = {}
    while engine.has_work:  # type: ignore[attr-defined]
        for progress in engine.step():  # type: ignore[attr-defined]
            if progress.result is not None:
                found[progress.number] = progress.result
    return found


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    budget=st.integers(1, 40),
    rows=st.integers(1, 20),
    page_size=st.sampled_from([1, 4]),
    num_pages=st.sampled_from([40, 200]),
    num_top=st.integers(0, 3),
)
def test_every_prompt_token_has_its_logprob_for_any_chunks_and_memory_pressure(
    lengths: list[int], budget: int, rows: int, page_size: int, num_pages: int, num_top: int
) -> None:
    engine, _ = make_engine(
        num_pages=num_pages,
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_prompt_logprobs=rows,
        max_model_len=39,
    )
    prompts = [
        [4 + (7 * i * i + j * (i + 3)) % 90 for j in range(n)] for i, n in enumerate(lengths)
    ]
    params = SamplingParams(
        temperature=0, prompt_logprobs=num_top, logprobs=num_top, max_tokens=5, ignore_eos=True
    )
    numbers = [engine.submit(prompt, params) for prompt in prompts]
    found = results(engine)
    for number, prompt in zip(numbers, prompts, strict=True):
        assert same(found[number].prompt_logprobs, expected(prompt, num_top))
        whole = prompt + list(found[number].token_ids)
        assert same(found[number].logprobs, expected(whole, num_top)[len(prompt) :])


def test_no_step_holds_more_rows_of_logits_than_were_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(max_prompt_logprobs=6, max_num_batched_tokens=64)
    shapes = []
    run = RememberingRunner.run

    def watched(self: RememberingRunner, batch: object) -> torch.Tensor:
        found = run(self, batch)  # type: ignore[arg-type]
        shapes.append(found.shape[0] - batch.num_sampled)  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(RememberingRunner, "run", watched)
    plain = SamplingParams(temperature=0, max_tokens=3)
    for index in range(3):
        params = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3)
        engine.submit([4 + index] * 20, params)
        engine.submit([50 + index] * 20, plain)
    results(engine)
    assert max(shapes) <= 6
    assert sum(shapes) == 3 * 19


def test_the_rows_allowed_fit_into_their_working_memory() -> None:
    for vocab in (100, 49_152, 151_936, 262_144):
        rows = max_prompt_logprobs(vocab)
        assert rows * vocab * 8 + 8 * 3 * vocab * 8 <= 256 * 2**20
        assert rows > 50


def test_a_prompt_whose_logprobs_are_asked_is_computed_though_it_is_cached() -> None:
    engine, runner = make_engine()
    prompt = list(range(4, 30))
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.submit(prompt, greedy)
    results(engine)
    before = runner.num_run_tokens
    asked = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    number = engine.submit(prompt, asked)
    found = results(engine)[number]
    assert found.num_cached_tokens == 0
    assert runner.num_run_tokens - before == len(prompt) + 1
    assert same(found.prompt_logprobs, expected(prompt, 0))
    other = engine.submit(prompt, greedy)
    assert results(engine)[other].num_cached_tokens == 24, "others still find the pages"


def test_what_it_computed_is_found_by_others() -> None:
    engine, _ = make_engine()
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    engine.submit(list(range(4, 30)), asked)
    results(engine)
    number = engine.submit(list(range(4, 30)), SamplingParams(temperature=0, max_tokens=1))
    assert results(engine)[number].num_cached_tokens == 24


def test_a_prompt_alone_can_be_scored_up_to_the_last_token_of_the_context() -> None:
    engine, _ = make_engine(num_pages=12, page_size=4)
    prompt = [4 + i % 50 for i in range(44)]
    number = engine.submit(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1))
    (first, *more) = [p for _ in range(4) for p in engine.step()]
    assert more == []
    assert first.number == number
    assert first.result is not None
    assert (first.token_ids, first.result.token_ids) == ((), ())
    assert first.result.finish_reason == "length"
    assert first.prompt_logprobs == first.result.prompt_logprobs
    assert same(first.prompt_logprobs, expected(prompt, 1))
    with pytest.raises(RequestError, match="max_tokens is 0"):
        engine.submit(prompt, SamplingParams(max_tokens=0))
    with pytest.raises(RequestError, match="44 tokens a sequence may have"):
        engine.submit([*prompt, 5], SamplingParams(max_tokens=0, prompt_logprobs=1))


def test_nan_anywhere_in_a_scored_prompt_ends_that_request_alone() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8)
    runner.poison = lambda context: context == list(range(4, 10))  # in the middle of the prompt
    good = engine.submit([50, 51], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    asked = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=4)
    bad = engine.submit(list(range(4, 30)), asked)
    unasked = engine.submit(list(range(4, 30)), SamplingParams(temperature=0, max_tokens=4))
    found = results(engine)
    assert found[bad].finish_reason == "numerical_error"
    assert found[bad].prompt_logprobs is None
    assert len(found[good].token_ids) == 8
    assert found[unasked].num_cached_tokens == 0, "other requests find none of its pages"


def test_ranks_and_tops_of_single_rows() -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, -torch.inf]])
    first, second = token_logprobs(rows, [2, 1], 2)
    assert (first.rank, [t for t, _ in first.top]) == (2, [1, 2])
    assert second.rank == 1
    assert second.logprob == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prompt_logprobs_equal_those_of_transformers_for_any_chunk_size(
    family: str, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path)
    prompt = [3 + (7 * i) % 120 for i in range(29)]
    module = tiny.make(family)
    module.set_attn_implementation("eager")  # "sdpa" lacks Gemma 2's soft caps before 5.21
    with torch.no_grad():
        rows = module(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    truth = [float(rows[i, prompt[i + 1]]) for i in range(len(prompt) - 1)]
    for budget in (5, 64):
        llm = LLM(path, dtype="float32", kv_cache_memory="1MiB", max_num_batched_tokens=budget)
        params = SamplingParams(max_tokens=0, prompt_logprobs=2)
        found = llm.generate(prompt, params)[0].prompt_logprobs
        assert found is not None
        ours = [one.logprob for one in found if one is not None]
        assert ours == pytest.approx(truth, abs=1e-4)
