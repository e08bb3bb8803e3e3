"""Layers with windows release pages while their sequences run, and no token changes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvant import LLM
from kvant.kv.groups import lay_out
from kvant.kv.pages import SCRATCH
from tests.engine.equality import Bench, run, tokens
from tests.models import tiny

PAGE_SIZE = 4
NUM_TOKENS = 14
PROMPTS = [
    [(11 * i + 5 * j * j + j) % 125 + 3 for j in range(3 + (13 * i) % 47)] for i in range(12)
]
LONG = [(7 * j * j + 3 * j) % 125 + 3 for j in range(60)]
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": _BOTH, "gemma3": _BOTH, "gpt_oss": _BOTH,
    "mistral": {"num_hidden_layers": 4}, "qwen2": {"max_window_layers": 1},
}  # fmt: skip
"""Layers with and without windows in turn. A shallow mistral would never repeat a draft of prompt lookup."""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


@cache
def bench_of(where: Path, family: str) -> tuple[Bench, Path]:
    path = tiny.build(family, where / family, **{"num_hidden_layers": 2, **FAMILIES[family]})
    llm = LLM(
        path, dtype="float64", page_size=PAGE_SIZE, kv_cache_memory="4MiB", max_model_len=128
    )  # fmt: skip
    return Bench(llm), path


def by_transformers(path: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    # transformers below 5.21 leaves Gemma 2's soft caps out of "sdpa".
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    model.set_experts_implementation("eager")  # the others have no float64
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        found.append(tuple(out[0, len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_under_every_pressure(where: Path, family: str) -> None:
    bench, path = bench_of(where, family)
    prompts = [LONG, *PROMPTS]
    expected = by_transformers(path, prompts)
    layout = lay_out(bench.plan)
    assert any(group.window == tiny.WINDOW for group in layout.groups)
    ample = bench.engine(num_pages=600, windows=True, caching=True)
    assert tokens(run(ample, prompts, NUM_TOKENS)) == expected
    assert ample.stats.num_preemptions == 0
    warm = run(ample, prompts, NUM_TOKENS)
    assert tokens(warm) == expected, "from the cache"
    assert all(r.num_cached_tokens > 0 for r in warm if r.num_prompt_tokens > PAGE_SIZE)
    preempted = 0
    for chunk, num_pages in ((5, 30), (16, 32), (64, 44)):
        engine = bench.engine(
            num_pages=num_pages, chunk=chunk, caching=True, windows=True, max_model_len=80
        )
        found = run(engine, prompts * 2, NUM_TOKENS, after_step=lambda e=engine: sound(e))
        assert tokens(found) == expected * 2, f"pieces of {chunk} in {num_pages} superblocks"
        preempted += engine.stats.num_preemptions
        assert engine.stats.num_held_pages == 0
    assert preempted > 0 or len(layout.groups) == 1


def sound(engine: object) -> None:
    assert engine.scheduler.audit() == []  # type: ignore[attr-defined]


def test_a_running_sequence_holds_no_more_than_its_windows(where: Path) -> None:
    bench, _ = bench_of(where, "gemma3")
    engine = bench.engine(num_pages=400, chunk=8, windows=True)
    most = [0, 0]

    def look() -> None:
        sound(engine)
        for sequence in engine.scheduler.sequences():
            for place, pages in enumerate(sequence.held):
                most[place] = max(most[place], sum(page != SCRATCH for page in pages))

    run(engine, [LONG], NUM_TOKENS, after_step=look)
    assert most[0] >= (len(LONG) + NUM_TOKENS - 2) // PAGE_SIZE
    assert most[1] <= -(-(tiny.WINDOW + 8) // PAGE_SIZE) + 1


def test_a_hit_needs_the_pages_of_a_window_alone_and_never_a_lost_one(where: Path) -> None:
    bench, _ = bench_of(where, "gemma3")
    prompt = [*LONG[:48], *PROMPTS[3][:9]]
    expected = bench.alone([prompt], NUM_TOKENS)
    engine = bench.engine(num_pages=200, chunk=8, caching=True, windows=True)
    run(engine, [LONG], NUM_TOKENS)
    full, recent = engine.scheduler.allocator.groups
    found = run(engine, [prompt], NUM_TOKENS)[0]
    assert found.num_cached_tokens == 48
    assert found.token_ids == expected[0]
    # Early pages of the window are not needed, a late one is.
    other = [*LONG[:48], *PROMPTS[5][:9]]
    hashes = [h for h in recent._page_of if h in full._page_of]
    for digest in hashes:
        if full._page_of[digest] in full.match(_chain(engine, LONG[:48]))[:8]:
            recent.forget(recent.match((digest,)))
    assert run(engine, [other], NUM_TOKENS)[0].num_cached_tokens == 48
    late = _chain(engine, LONG[:48])[10]
    recent.forget(recent.match((late,)))
    cold = run(engine, [[*LONG[:48], *PROMPTS[7][:9]]], NUM_TOKENS)[0]
    assert cold.num_cached_tokens < 44
    assert cold.token_ids == bench.alone([[*LONG[:48], *PROMPTS[7][:9]]], NUM_TOKENS)[0]


def _chain(engine: object, prompt: list[int]) -> list[bytes]:
    from kvant.kv.pages import page_hash, root_hash

    digest = root_hash(engine._identity)  # type: ignore[attr-defined]
    found = []
    for start in range(0, len(prompt), PAGE_SIZE):
        digest = page_hash(digest, prompt[start : start + PAGE_SIZE])
        found.append(digest)
    return found


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_drafts_change_nothing(where: Path, family: str) -> None:
    _, path = bench_of(where, family)
    llm = LLM(
        path, dtype="float64", page_size=PAGE_SIZE, kv_cache_memory="4MiB", max_model_len=128,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    bench = Bench(llm)
    prompts = [[*LONG[:17] * 2, *p[:6]] for p in PROMPTS[:5]]
    expected = by_transformers(path, prompts)
    for num_pages in (32, 200):
        engine = bench.engine(
            num_pages=num_pages, chunk=16, windows=True, drafting=True, caching=True,
            max_model_len=80,
        )  # fmt: skip
        found = run(engine, prompts, NUM_TOKENS, after_step=lambda e=engine: sound(e))
        assert tokens(found) == expected
    assert engine.stats.speculation is not None
    assert engine.stats.speculation.num_drafts > 0
