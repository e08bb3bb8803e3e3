"""NaN ends only the request that owns it, and none of its pages stay cached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvant.engine.engine import Engine
from kvant.execution.runner import ModelRunner
from kvant.kv.pool import KVPool
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason, Sequence
from tests.engine.equality import FORMATS, Bench, llama_for_every_format, run, tokens
from tests.engine.fakes import finish, num_computed
from tests.engine.test_equality import FEW, LONG, make

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
PROMPT = LONG[:22]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_for_every_format(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=FORMATS)
def bench(path: Path, request: pytest.FixtureRequest) -> Bench:
    return make(path, request.param, "float64")


def pool_of(engine: Engine) -> KVPool:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner.pool


def sequence_of(engine: Engine, number: int) -> Sequence:
    return next(s for s in engine.scheduler.sequences() if s.number == number)


def fill(pool: KVPool, pages: list[int], byte: int) -> None:
    """Every byte of these pages, scales among them: 0xff is NaN in every floating format."""
    for spec in pool.plan.layers:
        cache = pool[spec.geometry.index]
        for plane in (*cache.k, *cache.v):
            plane.view(torch.uint8)[pages] = byte


def test_nan_in_a_stored_page_ends_its_request_alone_and_leaves_nothing_behind(
    bench: Bench,
) -> None:
    expected = bench.alone([PROMPT, *FEW], NUM_TOKENS)
    engine = bench.engine(caching=True)
    victim = engine.submit(PROMPT, PARAMS)
    others = [engine.submit(prompt, PARAMS) for prompt in FEW]
    for _ in range(3):
        engine.step()
    fill(pool_of(engine), sequence_of(engine, victim).pages[1:2], 0xFF)
    results = finish(engine)
    assert results[victim].finish_reason is FinishReason.NUMERICAL_ERROR
    assert [results[number].token_ids for number in others] == expected[1:]

    again, once_more = (run(engine, [PROMPT], NUM_TOKENS)[0] for _ in range(2))
    assert again.num_cached_tokens == 0, "pages that may be the source of NaN cannot be found"
    assert again.token_ids == expected[0]
    assert once_more.num_cached_tokens > 0, "and the cache goes on"
    assert once_more.token_ids == expected[0]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "nvfp4"])
def test_a_scale_outside_the_pages_that_is_no_number_ends_requests_with_that_reason(
    path: Path, kv_cache_dtype: str
) -> None:
    bench = make(path, kv_cache_dtype, "float32")
    for wrong in (float("nan"), float("inf")):
        engine = bench.engine(caching=True)
        cache = pool_of(engine)[1]
        assert cache.k_scale is not None
        right = cache.k_scale.clone()
        cache.k_scale.fill_(wrong)
        result = run(engine, [PROMPT], NUM_TOKENS)[0]
        assert result.finish_reason is FinishReason.NUMERICAL_ERROR
        assert result.token_ids == ()
        assert engine.stats.num_idle_pages == 0, "none of its pages are in the prefix cache"
        cache.k_scale.copy_(right)
        assert (
            run(engine, [PROMPT], NUM_TOKENS)[0].token_ids == bench.alone([PROMPT], NUM_TOKENS)[0]
        )


def test_pages_of_a_prompt_in_chunks_cannot_be_found_before_its_first_token(path: Path) -> None:
    bench = make(path, "float32", "float32")
    engine = bench.engine(caching=True, chunk=8)
    number = engine.submit(PROMPT, PARAMS)
    engine.step()
    assert num_computed(engine, sequence_of(engine, number)) == 8
    fill(pool_of(engine), sequence_of(engine, number).pages[:1], 0xFF)
    other = engine.submit(PROMPT, PARAMS)
    results = finish(engine)
    assert results[number].finish_reason is FinishReason.NUMERICAL_ERROR
    assert results[other].finish_reason is FinishReason.LENGTH, "it did not join the bad page"
    assert results[other].token_ids == bench.alone([PROMPT], NUM_TOKENS)[0]


@pytest.mark.parametrize("step", [0, 2])
def test_nan_and_inf_in_one_row_of_logits_end_that_request_alone(path: Path, step: int) -> None:
    bench = make(path, "int8_per_token_head", "float64")
    expected = bench.alone(FEW, NUM_TOKENS)
    for wrong in (float("nan"), float("inf")):
        engine = bench.engine(caching=True)
        numbers = [engine.submit(prompt, PARAMS) for prompt in FEW]
        for _ in range(step):
            engine.step()
        inner = engine.runner.run

        def poisoned(batch: object, inner: object = inner, wrong: float = wrong) -> torch.Tensor:
            logits = inner(batch).clone()  # type: ignore[operator]
            logits[2, 5] = wrong
            return logits

        engine.runner.run = poisoned  # type: ignore[method-assign]
        engine.step()
        engine.runner.run = inner  # type: ignore[method-assign]
        results = finish(engine)
        reasons = [results[n].finish_reason for n in numbers if n in results]
        assert reasons.count(FinishReason.NUMERICAL_ERROR) <= 1
        kept = [n for n in numbers if n != numbers[2]]
        assert [results[n].token_ids for n in kept] == [e for i, e in enumerate(expected) if i != 2]


@pytest.mark.parametrize("byte", [0xFF, pytest.param(0x7F, marks=pytest.mark.slow)])
def test_pages_full_of_other_bytes_give_the_tokens_of_a_fresh_pool(bench: Bench, byte: int) -> None:
    expected = bench.alone(FEW, NUM_TOKENS)
    engine = bench.engine(num_pages=40, caching=True)
    fill(pool_of(engine), list(range(40)), byte)
    assert tokens(run(engine, FEW, NUM_TOKENS)) == expected
    fill(pool_of(engine), list(range(40)), byte)  # idle pages too: their contents are lost
    engine.scheduler.allocator.forget_all()
    assert tokens(run(engine, FEW * 3, NUM_TOKENS)) == expected * 3
