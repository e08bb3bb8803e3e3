"""SmolLM2 in float32: with float32 KV the tokens are the same as they are, with every other format in
batch-invariant mode. With torch's products, outside of the mode, a quantised format's do differ: the
negative control. Kvant's own products keep the promise without --batch-invariant too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvant import LLM
from kvant.engine.engine import Engine
from kvant.kv.dtype import KVDtype
from kvant.kv.names import known_names
from kvant.measure.teacher_forced import text_logits
from kvant.models.cpu import info
from tests.engine.equality import Bench, run, tokens

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
    "The three laws of thermodynamics are: first, energy is conserved; second,",
    "Die Hauptstadt von Deutschland ist",
)
EVERY = [d for d in KVDtype if d.format.name in known_names() and not d.format.takes_rounding]
QUANTISED = KVDtype.INT8_PER_TOKEN_HEAD


def load(*, mode: bool, backend: str = "auto") -> LLM:
    return LLM(
        "smollm2", dtype="float32", kv_cache_dtype="float32", kv_cache_memory="64MiB",
        batch_invariant=mode, attention_backend=backend, max_model_len=512, page_size=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def in_mode() -> LLM:
    return load(mode=True)


@pytest.fixture(scope="module")
def outside() -> LLM:
    return load(mode=False)


@pytest.fixture(scope="module")
def with_torchs_products() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(info, "refuse_host", lambda device: "the control has to run without kernels")
        yield load(mode=False)


def prompts_of(llm: LLM, count: int) -> list[list[int]]:
    return [list(llm.encode(text)) for text in TEXTS[:count]]


def check(bench: Bench, prompts: list[list[int]], num_tokens: int, chunks: tuple[int, ...]) -> int:
    """Every way of scheduling these prompts against each prompt alone; how many answers differ."""
    expected = bench.alone(prompts, num_tokens)
    assert len(set(expected)) == len(prompts), "these prompts cannot tell a mix-up"
    different = _differ(tokens(run(bench.engine(), prompts, num_tokens)), expected)
    for chunk in chunks:
        engine = bench.engine(chunk=chunk)
        different += _differ(tokens(run(engine, prompts, num_tokens)), expected)
        in_one_piece = chunk >= sum(len(prompt) for prompt in prompts)
        assert in_one_piece or engine.stats.num_steps > num_tokens, "prompts came in chunks"
    shared = bench.engine(caching=True)
    run(shared, prompts, 1)
    warm = run(shared, prompts, num_tokens)
    long_enough = [r for r in warm if r.num_prompt_tokens > bench.plan.page_size]
    assert long_enough
    assert all(r.num_cached_tokens > 0 for r in long_enough)
    different += _differ(tokens(warm), expected)
    small = _small_pool(bench, prompts, num_tokens)
    found = run(small, prompts * 2, num_tokens)
    assert small.stats.num_preemptions >= 1
    return different + _differ(tokens(found), expected * 2)


def _small_pool(bench: Bench, prompts: list[list[int]], num_tokens: int) -> Engine:
    """Room for the longest sequence and little more: some lose their pages."""
    longest = max(len(prompt) for prompt in prompts) + num_tokens
    pages = -(-longest // bench.plan.page_size)
    return bench.engine(num_pages=pages + len(prompts) + 1, chunk=16, caching=True)


def _differ(found: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> int:
    return sum(a != b for a, b in zip(found, expected, strict=True))


@pytest.mark.case("A49")
def test_in_batch_invariant_mode_logits_are_bitwise_the_same_in_any_chunks(in_mode: LLM) -> None:
    bench = Bench(in_mode, QUANTISED)
    prompt = prompts_of(in_mode, 5)[4]
    whole = text_logits(bench.model, bench.plan, prompt)
    assert torch.equal(text_logits(bench.model, bench.plan, prompt, chunk=7), whole)
    assert torch.equal(text_logits(bench.model, bench.plan, prompt, chunk=1), whole)


def test_with_torchs_products_they_are_not(with_torchs_products: LLM) -> None:
    bench = Bench(with_torchs_products, QUANTISED)
    prompt = prompts_of(with_torchs_products, 5)[4]
    whole = text_logits(bench.model, bench.plan, prompt)
    assert not torch.equal(text_logits(bench.model, bench.plan, prompt, chunk=1), whole)


def test_in_batch_invariant_mode_a_quantised_cache_gives_the_same_tokens_however_scheduled(
    in_mode: LLM,
) -> None:
    assert check(Bench(in_mode, QUANTISED), prompts_of(in_mode, 2), 6, (7,)) == 0


@pytest.mark.slow
@pytest.mark.case("A47", "A49")
@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_in_batch_invariant_mode_every_format_gives_the_same_tokens(
    in_mode: LLM, dtype: KVDtype
) -> None:
    assert check(Bench(in_mode, dtype), prompts_of(in_mode, 4), 12, (1, 7, 16, 64)) == 0


@pytest.mark.slow
def test_in_batch_invariant_mode_the_reference_backend_keeps_the_promise_too() -> None:
    llm = load(mode=True, backend="reference")
    assert check(Bench(llm, QUANTISED), prompts_of(llm, 4), 16, (7,)) == 0


@pytest.mark.slow
def test_with_float32_kv_tokens_are_the_same_as_they_are(outside: LLM) -> None:
    assert check(Bench(outside, KVDtype.FLOAT32), prompts_of(outside, 4), 16, (1, 7, 16, 64)) == 0


@pytest.mark.slow
def test_with_torchs_products_a_quantised_cache_gives_other_tokens(
    with_torchs_products: LLM,
) -> None:
    prompts = prompts_of(with_torchs_products, len(TEXTS))
    assert check(Bench(with_torchs_products, KVDtype.FP8_E4M3), prompts, 48, (1, 7, 16, 64)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [QUANTISED, KVDtype.INT4_PER_TOKEN_HEAD], ids=str)
def test_34_prompts_in_32_pages_get_the_tokens_of_a_large_pool(
    in_mode: LLM, dtype: KVDtype
) -> None:
    bench = Bench(in_mode, dtype)
    words = ["and", "then", "the", "fisherman", "said", "that", "the", "sea", "was", "calm"]
    prompts = [list(in_mode.encode(" ".join(words[: 1 + i % 9]) + f" {i}")) for i in range(34)]
    expected = bench.alone(prompts, 12)
    small = bench.engine(num_pages=33, caching=True)
    assert tokens(run(small, prompts, 12)) == expected
    assert small.stats.num_preemptions >= 1


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(-10, 11))
def test_a_hit_at_any_offset_around_a_pages_edge_gives_the_tokens_of_a_cold_run(
    in_mode: LLM, offset: int
) -> None:
    bench = Bench(in_mode, KVDtype.FP8_PER_TOKEN_HEAD)
    shared = (prompts_of(in_mode, 5)[4] * 4)[:48]
    more = prompts_of(in_mode, 2)[1]
    prompt = [*shared[: 48 + min(offset, 0)], *more[: max(offset, 0) + 2]]
    engine = bench.engine(caching=True)
    run(engine, [shared], 1)
    warm = run(engine, [prompt], 8)[0]
    assert warm.num_cached_tokens >= 32
    assert warm.token_ids == bench.alone([prompt], 8)[0]
