"""The same tokens under any scheduling, for every format, on a real model in float64.

In float64 the rounding of other batch shapes (1e-16) does not reach a stored code.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kvant import LLM, SamplingParams
from kvant.kv.dtype import KVDtype
from tests.engine.equality import COVERING, FORMATS, Bench, llama_for_every_format, run, tokens

PROMPTS = [[(11 * i + 5 * j * j + j) % 125 + 3 for j in range(3 + 5 * i % 14)] for i in range(34)]
FEW = PROMPTS[:5]
LONG = [(7 * j * j + 3 * j) % 125 + 3 for j in range(300)]
NUM_TOKENS = 10
PAGE_SIZE = 4


def make(path: Path, kv_cache_dtype: str, dtype: str) -> Bench:
    return Bench(
        LLM(
            path, kv_cache_dtype=kv_cache_dtype, dtype=dtype, page_size=PAGE_SIZE,
            kv_cache_memory="1MiB", max_model_len=256,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_for_every_format(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=FORMATS)
def bench(path: Path, request: pytest.FixtureRequest) -> Bench:
    return make(path, request.param, "float64")


@pytest.mark.case("A47")
def test_no_scheduling_changes_a_token(bench: Bench) -> None:
    expected = bench.alone(FEW, NUM_TOKENS)
    assert len(set(expected)) > 1, "these prompts cannot tell a mix-up"

    assert tokens(run(bench.engine(), FEW, NUM_TOKENS)) == expected, "in a batch"

    for chunk in (1, 7, 16, 64):
        engine = bench.engine(chunk=chunk)
        assert tokens(run(engine, FEW, NUM_TOKENS)) == expected, f"by chunks of {chunk}"
        assert engine.stats.num_steps > NUM_TOKENS or chunk == 64

    engine = bench.engine(caching=True)
    run(engine, FEW, NUM_TOKENS)
    warm = run(engine, FEW, NUM_TOKENS)
    assert all(r.num_cached_tokens > 0 for r in warm if r.num_prompt_tokens > PAGE_SIZE)
    assert tokens(warm) == expected, "from cached pages"


@pytest.mark.parametrize(
    "bench",
    [name if name in COVERING else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS],
    indirect=True,
)
def test_a_pool_of_32_pages_gives_34_prompts_the_tokens_of_a_large_one(bench: Bench) -> None:
    large = bench.engine(num_pages=2000, caching=True)
    expected = tokens(run(large, PROMPTS, NUM_TOKENS))
    assert large.stats.num_preemptions == 0
    small = bench.engine(num_pages=33, caching=True)
    assert tokens(run(small, PROMPTS, NUM_TOKENS)) == expected
    assert small.stats.num_preemptions >= 1


def test_chunks_of_any_size_read_a_prompt_of_300_tokens_alike(path: Path) -> None:
    bench = make(path, "int4_per_token_head", "float64")
    for length in (1, 15, 16, 17, 64, 65, 299, 300):
        expected = bench.alone([LONG[:length]], 4)
        for chunk in (1, 7, 16, 64):
            engine = bench.engine(chunk=chunk)
            assert tokens(run(engine, [LONG[:length]], 4)) == expected
            assert engine.stats.num_steps == -(-length // chunk) + 3, "it came in chunks"


def test_with_float32_kv_the_same_holds_in_float32(path: Path) -> None:
    bench = make(path, "float32", "float32")
    expected = bench.alone(FEW, NUM_TOKENS)
    assert tokens(run(bench.engine(), FEW, NUM_TOKENS)) == expected
    assert tokens(run(bench.engine(chunk=7), FEW, NUM_TOKENS)) == expected
    small = bench.engine(num_pages=33, caching=True)
    assert tokens(run(small, FEW * 7, NUM_TOKENS)) == expected * 7
    assert small.stats.num_preemptions >= 1


@pytest.mark.case("A47")
@pytest.mark.parametrize("offset", range(-10, 11))
def test_a_hit_at_any_offset_around_a_pages_edge_gives_the_tokens_of_a_cold_run(
    path: Path, offset: int
) -> None:
    bench = _cached_bench(path)
    shared = LONG[:24]  # six pages
    prompt = [*shared[: 24 + min(offset, 0)], *PROMPTS[6][: max(offset, 0) + 2]]
    engine = bench.engine(caching=True)
    run(engine, [shared], 1)
    warm = run(engine, [prompt], NUM_TOKENS)[0]
    assert warm.num_cached_tokens >= 12
    assert warm.token_ids == bench.alone([prompt], NUM_TOKENS)[0]


@cache
def _cached_bench(path: Path) -> Bench:
    return make(path, "fp8_per_token_head", "float64")


def test_everything_at_once_in_a_full_pool_changes_no_token(bench: Bench) -> None:
    """Hits, chunks, preemption and a pool that is never less than full, in one run."""
    shared = LONG[:14]
    prompts = [[*shared, *prompt] for prompt in PROMPTS[:12]]
    expected = bench.alone(prompts, NUM_TOKENS)
    engine = bench.engine(num_pages=25, chunk=16, caching=True)
    fullest = 0

    def look() -> None:
        nonlocal fullest
        fullest = max(fullest, engine.stats.num_held_pages + engine.stats.num_idle_pages)

    found = run(engine, prompts * 2, NUM_TOKENS, after_step=look)
    assert tokens(found) == expected * 2
    assert engine.stats.num_preemptions >= 1
    assert sum(result.num_cached_tokens > 0 for result in found) >= 12
    assert fullest == engine.stats.num_usable_pages, "there was no page left without contents"


@pytest.mark.parametrize("dtype", ["float32", "int4_per_token_head"])
def test_a_seed_gives_the_same_answer_alone_in_a_batch_and_after_a_restart(
    path: Path, dtype: str
) -> None:
    bench = make(path, dtype, "float64")
    options = {"temperature": 1.0, "seed": 7, "top_p": 0.95}
    expected = bench.alone(FEW, NUM_TOKENS, **options)
    assert expected != bench.alone(FEW, NUM_TOKENS, temperature=1.0, seed=8, top_p=0.95)
    assert tokens(run(bench.engine(), FEW, NUM_TOKENS, **options)) == expected
    small = bench.engine(num_pages=33, caching=True)
    assert tokens(run(small, FEW * 7, NUM_TOKENS, **options)) == expected * 7
    assert small.stats.num_preemptions >= 1
    again = make(path, dtype, "float64")
    assert tokens(run(again.engine(), FEW, NUM_TOKENS, **options)) == expected


@pytest.mark.case("A48")
def test_pages_of_another_format_salt_or_revision_are_never_found(path: Path) -> None:
    bench = make(path, "int8_per_token_head", "float64")
    engine = bench.engine(caching=True)
    prompt = LONG[:20]
    run(engine, [prompt], 1)
    assert run(engine, [prompt], 1)[0].num_cached_tokens > 0
    others = (
        {"plan": make(path, "fp8", "float64").plan.fingerprint},
        {"revision": "another"},
        {"model": "another"},
    )
    identity = engine._identity
    for other in others:
        engine._identity = replace(identity, **other)
        assert run(engine, [prompt], 1)[0].num_cached_tokens == 0, other
    engine._identity = identity
    number = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=1), salt="somebody")
    results = [p.result for p in engine.step() if p.number == number]
    assert results[0] is not None
    assert results[0].num_cached_tokens == 0


def test_formats_of_these_tests_are_all_that_can_be_asked_for() -> None:
    assert {d.format.name for d in KVDtype} >= set(FORMATS)
    assert len(FORMATS) >= 9
