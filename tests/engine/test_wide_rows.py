"""First and last tokens are read from wide rows, and no token depends on how that came about."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from kvant import LLM
from kvant.errors import NotServable
from kvant.kv.dtype import KVDtype
from kvant.kv.groups import lay_out
from kvant.kv.names import FormatRequest, SideRequests
from kvant.kv.pages import SCRATCH
from kvant.kv.request import Asked, AskedWide, KVRequest, Selector, WideRule
from kvant.plan.resolution import resolve_again
from tests.engine.equality import Bench, run, tokens
from tests.models import families, tiny

PAGE_SIZE = 4
NUM_TOKENS = 24
SINK, RECENT = 3, 10
NARROW = FormatRequest(KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD)
WIDE = SideRequests(KVDtype.FLOAT32, KVDtype.FLOAT32)
PROMPTS = [[(11 * i + 5 * j * j + j) % 125 + 3 for j in range(3 + (13 * i) % 47)] for i in range(7)]
LONG = [(7 * j * j + 3 * j) % 125 + 3 for j in range(60)]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wide")


@cache
def bench_of(where: Path, *, drafting: bool = False) -> Bench:
    """In float64, in which codes do not depend on the shapes of steps."""
    path = tiny.build("llama", where / "llama", num_hidden_layers=2)
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    llm = LLM(
        path, dtype="float64", page_size=PAGE_SIZE, kv_cache_memory="4MiB", max_model_len=128,
        **(drafts if drafting else {}),
    )  # fmt: skip
    bench = Bench(llm)
    asked = AskedWide(SINK, RECENT, WIDE, "test")
    request = KVRequest(explicit=(Asked(NARROW, "test"),), wide=asked)
    bench.plan = resolve_again(llm.planned, request)
    assert all(layer.wide is not None for layer in bench.plan.layers)
    return bench


def sound(engine: object) -> None:
    assert engine.scheduler.audit() == []  # type: ignore[attr-defined]


def test_tokens_depend_neither_on_pieces_nor_on_hits_nor_on_preemption(where: Path) -> None:
    bench = bench_of(where)
    prompts = [LONG, *PROMPTS]
    expected = bench.alone(prompts, NUM_TOKENS)  # every row of every token is kept here
    narrow = Bench(bench.llm, KVDtype.INT4_PER_TOKEN_HEAD).alone(prompts, NUM_TOKENS)
    assert narrow != expected, "wide rows are read"
    ample = bench.engine(num_pages=900, windows=True, caching=True)
    assert tokens(run(ample, prompts, NUM_TOKENS)) == expected
    warm = run(ample, prompts, NUM_TOKENS)
    assert tokens(warm) == expected, "from the cache"
    assert all(r.num_cached_tokens > 0 for r in warm if r.num_prompt_tokens > PAGE_SIZE)
    preempted = 0
    for chunk, num_pages in ((16, 11), (64, 14)):
        engine = bench.engine(
            num_pages=num_pages, chunk=chunk, caching=True, windows=True, max_model_len=96
        )
        found = run(engine, prompts, NUM_TOKENS, after_step=lambda e=engine: sound(e))
        assert tokens(found) == expected, f"pieces of {chunk} in {num_pages} superblocks"
        preempted += engine.stats.num_preemptions
        assert engine.stats.num_held_pages == 0
    assert preempted > 0


def test_layers_have_numbers_of_wide_rows_of_their_own(where: Path) -> None:
    llm = bench_of(where).llm
    asked = AskedWide(SINK, RECENT, WIDE, "test")
    more = WideRule(Selector("1", first=1, last=1), replace(asked, recent=3 * RECENT), "test")
    bench = Bench(llm)
    bench.plan = resolve_again(
        llm.planned, KVRequest(explicit=(Asked(NARROW, "test"),), wide=asked, wide_rules=(more,))
    )
    groups = lay_out(bench.plan).groups
    assert {(g.window, g.sink) for g in groups[1:]} == {(RECENT, SINK), (3 * RECENT, SINK)}
    prompts = [LONG, *PROMPTS]
    expected = bench.alone(prompts, NUM_TOKENS)
    assert expected != bench_of(where).alone(prompts, NUM_TOKENS)
    engine = bench.engine(num_pages=900, windows=True, caching=True, chunk=16)
    for _ in range(2):  # the second time from the cache
        found = run(engine, prompts, NUM_TOKENS, after_step=lambda: sound(engine))
        assert tokens(found) == expected


def test_layers_store_one_side_wide_each(where: Path) -> None:
    llm = bench_of(where).llm
    keys, values = (
        AskedWide(SINK, RECENT, SideRequests(*sides), "test")
        for sides in ((KVDtype.FLOAT32, None), (None, KVDtype.FLOAT32))
    )
    bench = Bench(llm)
    rule = WideRule(Selector("1", first=1, last=1), values, "test")
    bench.plan = resolve_again(
        llm.planned, KVRequest(explicit=(Asked(NARROW, "test"),), wide=keys, wide_rules=(rule,))
    )
    assert [str(layer.wide) for layer in bench.plan.layers] == [
        f"first {SINK} and last {RECENT} of {side} in float32" for side in "KV"
    ]
    prompts = [LONG, *PROMPTS]
    expected = bench.alone(prompts, NUM_TOKENS)
    assert expected != bench_of(where).alone(prompts, NUM_TOKENS)
    engine = bench.engine(num_pages=900, windows=True, caching=True, chunk=16)
    for _ in range(2):  # the second time from the cache
        found = run(engine, prompts, NUM_TOKENS, after_step=lambda: sound(engine))
        assert tokens(found) == expected


def test_a_sequence_holds_its_first_pages_and_its_window(where: Path) -> None:
    bench = bench_of(where)
    engine = bench.engine(num_pages=900, chunk=8, windows=True)
    group = lay_out(bench.plan).groups[1]
    assert (group.window, group.sink) == (RECENT, SINK)
    most = 0

    def look() -> None:
        nonlocal most
        sound(engine)
        for sequence in engine.scheduler.sequences():
            if sequence.held:
                held = [page != SCRATCH for page in sequence.held[1]]
                assert held[0], "the page of the first tokens"
                most = max(most, sum(held))

    run(engine, [LONG], NUM_TOKENS, after_step=look)
    assert 4 <= most <= group.most_pages(1000, 8, PAGE_SIZE)


def test_a_hit_needs_the_first_page_and_the_window_alone(where: Path) -> None:
    bench = bench_of(where)
    prompt = [*LONG[:48], *PROMPTS[3][:9]]
    expected = bench.alone([prompt], NUM_TOKENS)[0]
    engine = bench.engine(num_pages=900, chunk=8, caching=True, windows=True)
    run(engine, [LONG], NUM_TOKENS)
    _, wide = engine.scheduler.allocator.groups
    hashes = _chain(engine, LONG[:48])
    for digest in hashes[1:9]:
        wide.forget(wide.match((digest,)))
    hit = run(engine, [prompt], NUM_TOKENS)[0]
    assert (hit.num_cached_tokens, hit.token_ids) == (48, expected)
    wide.forget(wide.match((hashes[0],)))
    other = [*LONG[:48], *PROMPTS[5][:9]]
    cold = run(engine, [other], NUM_TOKENS)[0]
    assert (cold.num_cached_tokens, cold.token_ids) == (0, bench.alone([other], NUM_TOKENS)[0])


def _chain(engine: object, prompt: list[int]) -> list[bytes]:
    from kvant.kv.pages import page_hash, root_hash

    digest = root_hash(engine._identity)  # type: ignore[attr-defined]
    found = []
    for start in range(0, len(prompt), PAGE_SIZE):
        digest = page_hash(digest, prompt[start : start + PAGE_SIZE])
        found.append(digest)
    return found


def test_drafts_change_nothing(where: Path) -> None:
    bench = bench_of(where, drafting=True)
    prompts = [[*LONG[:17] * 2, *p[:6]] for p in PROMPTS[:5]]
    expected = bench.alone(prompts, NUM_TOKENS)
    for num_pages in (30, 900):
        engine = bench.engine(
            num_pages=num_pages, chunk=16, windows=True, drafting=True, caching=True,
            max_model_len=80,
        )  # fmt: skip
        found = run(engine, prompts, NUM_TOKENS, after_step=lambda e=engine: sound(e))
        assert tokens(found) == expected
    assert engine.stats.speculation is not None
    assert engine.stats.speculation.num_drafts > 0


def test_recurrent_models_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    families.build("qwen3_5_text", tmp_path)
    options = {"kv_cache_dtype": "int4_per_token_head", "max_model_len": 64}
    with pytest.raises(NotServable, match="kv_recent_tokens=8") as fault:
        LLM(tmp_path, kv_cache_memory="4MiB", kv_recent_tokens=8, **options)
    assert "recurrent" in str(fault.value)
    assert [str(way) for way in fault.value.ways_out] == ["leave the option out"]
    assert LLM(tmp_path, kv_cache_memory="4MiB", **options).plan.has_states


def test_batch_invariant_answers_have_the_same_bits(where: Path) -> None:
    path = tiny.build("llama", where / "invariant", num_hidden_layers=2)
    llm = LLM(
        path, page_size=PAGE_SIZE, kv_cache_memory="8MiB", max_model_len=96, batch_invariant=True,
        kv_cache_dtype="int4_per_token_head", kv_recent_tokens=RECENT, kv_sink_tokens=SINK,
        attention_backend="reference",
    )  # fmt: skip
    assert llm.plan.has_wide_rows
    bench = Bench(llm)
    expected = bench.alone(PROMPTS[:3], 8)
    engine = bench.engine(num_pages=300, chunk=7, windows=True, caching=True)
    assert tokens(run(engine, PROMPTS[:3] * 2, 8)) == expected * 2
