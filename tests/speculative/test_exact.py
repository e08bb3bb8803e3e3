"""A target and its drafter, for real: the tokens of plain greedy decoding, in every pair of formats."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from kvant.engine.llm import LLM
from kvant.engine.result import Result
from kvant.errors import BadValue
from kvant.kv.dtype import KVDtype
from kvant.kv.names import known_names
from kvant.sampling.sampling_params import SamplingParams
from tests.speculative.engines import make_llm
from tests.speculative.pair import ANSWER, Pair

TARGETS = [
    d.format.name for d in KVDtype if d.format.name in known_names() and not d.format.takes_rounding
]
DRAFTS = ["bfloat16", "fp8", "int8_per_token_head", "int4_per_token_head"]
PARAMS = SamplingParams(temperature=0, max_tokens=ANSWER + 6, ignore_eos=True)


def tokens(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def generate(llm: LLM, pair: Pair) -> list[tuple[int, ...]]:
    found = tokens(llm.generate([list(p) for p in pair.prompts], PARAMS))
    llm.engine.audit()
    return found


def assert_some_stood_and_some_did_not(llm: LLM) -> None:
    found = llm.metrics()
    accepted = found["spec_decode_num_accepted_tokens"]
    assert 0 < accepted < found["spec_decode_num_draft_tokens"]
    assert 1 < found["spec_decode_mean_acceptance_length"] < 5
    assert sum(found["spec_decode_num_accepted_tokens_per_pos"]) == accepted


@pytest.fixture(scope="module")
def plain(pair: Pair):
    @cache
    def answers(target_kv: str) -> list[tuple[int, ...]]:
        return generate(make_llm(pair, plain=True, kv_cache_dtype=target_kv), pair)

    return answers


@pytest.mark.case("A59", "A31", "A32", "F5")
@pytest.mark.parametrize(
    ("target_kv", "draft_kv"),
    [
        # Each target format with one draft format, each draft format with one target format more.
        *((kv, DRAFTS[i % len(DRAFTS)]) for i, kv in enumerate(TARGETS)),
        *(("fp8", kv) for kv in DRAFTS),
    ],
)
def test_every_format_gives_the_tokens_of_plain_decoding(
    pair: Pair, plain, target_kv: str, draft_kv: str
) -> None:
    llm = make_llm(pair, kv_cache_dtype=target_kv, draft_kv=draft_kv)
    assert llm.planned.draft is not None
    assert {str(layer.k.dtype) for layer in llm.planned.draft.kv.layers if layer.k} != {"auto"}
    assert generate(llm, pair) == plain(target_kv)
    assert_some_stood_and_some_did_not(llm)


@pytest.mark.slow
@pytest.mark.case("A59")
@pytest.mark.parametrize(("target_kv", "draft_kv"), list(product(TARGETS, DRAFTS)))
def test_the_whole_cross_of_formats_gives_the_tokens_of_plain_decoding(
    pair: Pair, plain, target_kv: str, draft_kv: str
) -> None:
    llm = make_llm(pair, kv_cache_dtype=target_kv, draft_kv=draft_kv)
    assert generate(llm, pair) == plain(target_kv)
    assert_some_stood_and_some_did_not(llm)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 9},
        {"max_num_batched_tokens": 64, "max_num_seqs": 3},
        {"page_size": 1},
        {"page_size": 64},
        {"num_speculative_tokens": 2},
        {"enable_prefix_caching": False},
        {"adaptive": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kv", ["model", "fp8"])
def test_chunks_pages_and_batches_make_no_difference(
    pair: Pair, plain, options: dict[str, int], kv: str
) -> None:
    llm = make_llm(pair, kv_cache_dtype=kv, **options)
    assert generate(llm, pair) == plain(kv)
    assert llm.metrics()["spec_decode_num_accepted_tokens"] > 0


def test_preempted_sequences_go_on_with_their_context(pair: Pair, plain) -> None:
    llm = make_llm(pair, page_size=4, kv_cache_memory="300KB", max_model_len=80)
    assert generate(llm, pair) == plain("model")
    found = llm.metrics()
    assert found["num_preemptions"] > 0
    assert_some_stood_and_some_did_not(llm)


def test_a_cached_prefix_carries_the_drafters_context_too(pair: Pair) -> None:
    """The second time most of the prompt comes from the cache, and as many drafts stand."""
    llm = make_llm(pair, page_size=4)
    counts, answers = [], []
    for _ in range(2):
        before = llm.engine.stats.speculation
        assert before is not None
        results = [llm.generate([list(p)], PARAMS)[0] for p in pair.prompts]
        after = llm.engine.stats.speculation
        assert after is not None
        counts.append(after.since(before))
        answers.append(tokens(results))
    assert sum(r.num_cached_tokens for r in results) > 50
    assert answers[0] == answers[1]
    assert counts[0].accepted_per_position == counts[1].accepted_per_position
    assert counts[0].num_accepted_tokens > 0


def test_pages_filled_while_speculation_stepped_aside_carry_context(pair: Pair) -> None:
    """Context is written in every step, with drafts or without."""
    prompt = list(pair.prompts[0])
    (answer,) = make_llm(pair, plain=True).generate([prompt], PARAMS)
    longer = [*prompt, *answer.token_ids[:16]]
    accepted = []
    for drafting in (True, False):
        llm = make_llm(pair, page_size=4)
        speculation = llm.engine.speculation
        assert speculation is not None
        if not drafting:
            speculation._most, most = 0, speculation._most
        llm.generate([prompt], PARAMS)
        if not drafting:
            speculation._most = most
        before = speculation.stats
        (result,) = llm.generate([longer], PARAMS)
        assert result.num_cached_tokens > len(prompt)
        accepted.append(speculation.stats.since(before).accepted_per_position)
    assert accepted[0] == accepted[1]
    assert sum(accepted[0]) > 0


def test_a_cancelled_request_leaves_the_others_their_answers(pair: Pair, plain) -> None:
    llm = make_llm(pair)
    engine = llm.engine
    numbers = [engine.submit(list(p), PARAMS) for p in pair.prompts]
    for _ in range(4):
        engine.step()
    for number in numbers[::3]:
        engine.cancel(number)
    found = {}
    while engine.has_work:
        for piece in engine.step():
            if piece.result is not None:
                found[piece.number] = piece.result.token_ids
    for number, expected in zip(numbers, plain("model"), strict=True):
        if number in found:
            assert found[number] == expected
    assert len(found) >= 6
    engine.audit()


def test_prompt_lookup_gives_the_same_tokens(pair: Pair, plain) -> None:
    llm = make_llm(pair, method="ngram")
    assert generate(llm, pair) == plain("model")
    assert llm.metrics()["spec_decode_num_drafts"] > 0


@pytest.mark.case("A33")
def test_target_and_draft_have_pools_of_their_own_in_one_budget(pair: Pair) -> None:
    llm = make_llm(pair, kv_cache_dtype="fp8", draft_kv="bfloat16")
    planned, pool = llm.planned, llm.engine.runner.pool  # type: ignore[attr-defined]
    speculation = llm.engine.speculation
    assert speculation is not None
    draft_pool = speculation._proposer.pool  # type: ignore[attr-defined]
    assert pool.num_pages == draft_pool.num_pages == planned.memory.num_pages
    assert pool.num_bytes == planned.memory.kv_bytes
    assert draft_pool.num_bytes == planned.memory.num_pages * planned.draft.kv.page_bytes
    used = pool.num_bytes + draft_pool.num_bytes
    assert 0 <= 4_000_000 - used < planned.page_bytes
    assert llm.engine.stats.num_usable_pages == planned.memory.num_pages - 1


@pytest.mark.case("A60")
def test_acceptance_is_counted_for_each_pair_of_formats(pair: Pair) -> None:
    from benchmarks.speculation import compare, parse_pair

    from kvant.plan.config import config_of
    from kvant.plan.speculative_config import parse_speculative_config

    config = config_of(pair.target, {"dtype": "float64", "kv_cache_memory": "4MB", "seed": 0})
    asked = parse_speculative_config(
        {"method": "dflash", "model": str(pair.draft), "adaptive": False}
    )
    pairs = [parse_pair(text, asked_by="--pair") for text in ("fp8:bf16", "bf16:fp8")]
    prompts = [list(p) for p in pair.prompts[:4]]
    rows = list(compare(config, asked, pairs, prompts, 20))
    assert [(row.target, row.draft) for row in rows] == [
        ("fp8_e4m3", "bfloat16"), ("bfloat16", "fp8_e4m3"),
    ]  # fmt: skip
    for row in rows:
        assert row.same_answers == row.num_prompts == 4
        assert row.stats.num_drafts > 0
        assert row.as_json()["accepted_per_position"] == [round(x, 4) for x in row.accepted]


def test_more_drafts_than_the_block_holds_are_refused_and_the_way_out_works(pair: Pair) -> None:
    with pytest.raises(BadValue, match="at most 4") as refused:
        make_llm(pair, num_speculative_tokens=5)
    assert "give at most 4" in str(refused.value.ways_out[0])
    make_llm(pair, num_speculative_tokens=4)


@pytest.mark.case("A36")
@pytest.mark.parametrize("kv", ["fp8", "int4_per_token_head", "model"])
def test_a_drafter_that_shares_the_targets_cache_reads_its_owners_format(
    pair: Pair, kv: str
) -> None:
    """Queries keep their own dtype for any stored format."""
    llm = make_llm(pair, method="tests.speculative.sharing:METHOD", kv_cache_dtype=kv)
    llm.generate([list(pair.prompts[0])], PARAMS)
    speculation = llm.engine.speculation
    assert speculation is not None
    read = speculation._proposer.read  # type: ignore[attr-defined]
    assert len(read) > 10
    assert {dtype for _, dtype in read} == {torch.float64}
    assert max(distance for distance, _ in read) < 1e-12


def test_a_drafter_may_compute_in_another_dtype_than_its_target(pair: Pair) -> None:
    """Left to themselves each computes in its checkpoint's dtype, where the machine is fast in it."""
    llm = make_llm(pair, dtype="auto")
    plain = make_llm(pair, plain=True, dtype="auto")
    assert llm.planned.draft is not None
    assert llm.plan.compute_dtype.value == "float32"
    assert generate(llm, pair) == generate(plain, pair)
    assert_some_stood_and_some_did_not(llm)
