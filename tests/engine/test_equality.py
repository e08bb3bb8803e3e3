"""The same tokens whatever the scheduling, for every format, on a real model in float64.

In float64 the rounding of other batch shapes (1e-16) does not reach a stored code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from kvant import LLM
from kvant.engine.engine import CacheIdentity, Engine
from kvant.engine.result import Result
from kvant.engine.runner import ModelRunner
from kvant.engine.sampling_params import SamplingParams
from kvant.engine.scheduler import SchedulerLimits
from kvant.kv.dtype import KVDtype
from kvant.kv.names import known_names
from tests.models import tiny

FORMATS = [d.format.name for d in KVDtype if d.format.name in known_names()]
PROMPTS = [[(11 * i + 5 * j * j + j) % 125 + 3 for j in range(3 + 5 * i % 14)] for i in range(34)]
FEW = PROMPTS[:5]
NUM_TOKENS = 10


class Bench:
    """One loaded model; a fresh pool and loop for every question."""

    def __init__(self, path: Path, kv_cache_dtype: str, dtype: str) -> None:
        self.llm = LLM(
            path, kv_cache_dtype=kv_cache_dtype, dtype=dtype, page_size=4, kv_cache_memory="1MiB",
            max_model_len=256,
        )  # fmt: skip
        runner = self.llm.engine.runner
        assert isinstance(runner, ModelRunner)
        self.model = runner.model

    def engine(
        self, *, num_pages: int = 200, chunk: int = 512, caching: bool = True, seqs: int = 40
    ) -> Engine:
        return Engine(
            ModelRunner(self.model, num_pages),
            SchedulerLimits(
                max_num_seqs=seqs,
                max_num_batched_tokens=chunk,
                max_model_len=31 * 4,
                page_size=4,
                prefix_caching=caching,
            ),
            num_pages,
            identity=CacheIdentity("tiny", None, self.llm.plan.fingerprint),
            vocab_size=tiny.VOCAB,
        )


def run(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Result]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    numbers = [engine.submit(prompt, params) for prompt in prompts]
    results = {}
    while engine.has_work:
        for progress in engine.step():
            if progress.result is not None:
                results[progress.number] = progress.result
        engine.audit()
    return [results[number] for number in numbers]


def alone(
    bench: Bench, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS
) -> list[tuple[int, ...]]:
    """Every prompt by itself, in one piece, in a fresh pool."""
    found = []
    for prompt in prompts:
        result = run(bench.engine(caching=False), [prompt], num_tokens)[0]
        assert result.num_cached_tokens == 0
        found.append(result.token_ids)
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=FORMATS)
def bench(path: Path, request: pytest.FixtureRequest) -> Bench:
    return Bench(path, request.param, "float64")


def tokens(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def test_no_scheduling_changes_a_token(bench: Bench) -> None:
    expected = alone(bench, FEW)
    assert len(set(expected)) > 1, "these prompts cannot tell a mix-up"

    assert tokens(run(bench.engine(), FEW, NUM_TOKENS)) == expected, "in a batch"

    for chunk in (1, 7, 16):
        engine = bench.engine(chunk=chunk, caching=False)
        assert tokens(run(engine, FEW, NUM_TOKENS)) == expected, f"by chunks of {chunk}"
        assert engine.stats.num_steps > NUM_TOKENS

    engine = bench.engine()
    run(engine, FEW, NUM_TOKENS)
    warm = run(engine, FEW, NUM_TOKENS)
    assert all(r.num_cached_tokens > 0 for r in warm if r.num_prompt_tokens > 4)
    assert tokens(warm) == expected, "from cached pages"


def test_a_pool_of_32_pages_gives_34_prompts_the_tokens_of_a_large_one(path: Path) -> None:
    for kv_cache_dtype in ("float32", "int4_per_token_head"):
        bench = Bench(path, kv_cache_dtype, "float64")
        large = bench.engine(num_pages=2000)
        expected = tokens(run(large, PROMPTS, NUM_TOKENS))
        assert large.stats.num_preemptions == 0
        small = bench.engine(num_pages=33)
        assert tokens(run(small, PROMPTS, NUM_TOKENS)) == expected
        assert small.stats.num_preemptions >= 1


def test_with_float32_kv_the_same_holds_in_float32(path: Path) -> None:
    bench = Bench(path, "float32", "float32")
    expected = alone(bench, FEW)
    assert tokens(run(bench.engine(), FEW, NUM_TOKENS)) == expected
    assert tokens(run(bench.engine(chunk=7), FEW, NUM_TOKENS)) == expected
    small = bench.engine(num_pages=33)
    assert tokens(run(small, FEW * 7, NUM_TOKENS)) == expected * 7
    assert small.stats.num_preemptions >= 1


@pytest.mark.parametrize("offset", range(-5, 6))
def test_a_hit_at_any_offset_around_a_pages_edge_gives_the_tokens_of_a_cold_run(
    path: Path, offset: int
) -> None:
    bench = _cached_bench(path)
    shared = PROMPTS[2] + PROMPTS[3][:2]  # 16 tokens at least: four pages
    shared = (shared * 2)[:16]
    prompt = [*shared[: 16 + min(offset, 0)], *PROMPTS[6][: max(offset, 0) + 2]]
    engine = bench.engine()
    run(engine, [shared], 1)
    warm = run(engine, [prompt], NUM_TOKENS)[0]
    assert warm.num_cached_tokens >= 8
    assert warm.token_ids == alone(bench, [prompt])[0]


@cache
def _cached_bench(path: Path) -> Bench:
    return Bench(path, "fp8_per_token_head", "float64")
