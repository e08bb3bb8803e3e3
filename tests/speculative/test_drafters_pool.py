"""The drafter's pages are looked at like the target's, and reports say whose layer they speak of."""

from __future__ import annotations

import pytest

from kvant.engine.llm import LLM
from kvant.execution.runner import ModelRunner
from kvant.kv.pool import KVPool
from kvant.sampling.sampling_params import SamplingParams
from tests.speculative.engines import make_llm
from tests.speculative.pair import ANSWER, Pair

GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


def drafts_pool(llm: LLM) -> KVPool:
    assert isinstance(llm.engine.runner, ModelRunner)
    _, drafts = llm.engine.runner.pools
    return drafts


def test_a_bit_that_flips_in_a_drafters_scale_is_noticed(pair: Pair) -> None:
    llm = make_llm(pair, kv_cache_dtype="float32", draft_kv="int8_per_token_head")
    for _ in range(2):
        llm.generate([list(pair.prompts[0])], GREEDY)
        assert llm.engine.audit_scales() == []
    page = next(iter(llm.engine.scheduler.allocator.groups[0]._hash_of))
    cache = drafts_pool(llm)[1]
    cache.v[1][page] *= 2
    (found,) = llm.engine.audit_scales()
    assert f"page {page} " in found
    assert llm.engine.audit_scales() == []


def test_a_drafters_scale_outside_the_pages_is_put_back(pair: Pair) -> None:
    llm = make_llm(pair, kv_cache_dtype="float32", draft_kv="fp8_e4m3")
    scale = drafts_pool(llm)[0].k_scale
    assert scale is not None
    was = scale.clone()
    scale.fill_(float("nan"))
    (found,) = llm.engine.audit_scales()
    assert "the K scale of draft layer 0" in found
    assert scale.tolist() == was.tolist()


def test_values_beyond_a_drafters_format_are_counted_and_logged_as_the_drafters(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(pair, kv_cache_dtype="float32", draft_kv="fp8_e4m3")
    scale = drafts_pool(llm)[1].v_scale
    assert scale is not None
    scale.fill_(1e-6)
    prompts = [list(prompt) for prompt in pair.prompts]
    llm.generate(prompts, GREEDY)
    assert set(llm.metrics()["kv_saturated_values"]) == {"draft:1"}
    assert any("layer draft:1 (" in line for line in caplog.messages)
