"""On a GPU drafts never change an answer either: python -m pytest -m gpu here."""

from __future__ import annotations

from functools import cache

import pytest

from tests.speculative.engines import make_llm
from tests.speculative.pair import Pair
from tests.speculative.test_exact import assert_some_stood_and_some_did_not, generate

pytestmark = pytest.mark.gpu

FORMATS = ["bfloat16", "fp8", "int8_per_token_head", "int4_per_token_head"]
OPTIONS = {"device": "cuda", "dtype": "bfloat16", "batch_invariant": True, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def plain(pair: Pair):
    @cache
    def answers(target_kv: str) -> list[tuple[int, ...]]:
        return generate(make_llm(pair, plain=True, kv_cache_dtype=target_kv, **OPTIONS), pair)

    return answers


@pytest.mark.parametrize("draft_kv", FORMATS)
@pytest.mark.parametrize("target_kv", FORMATS)
def test_every_pair_of_formats_gives_the_tokens_of_plain_decoding(
    pair: Pair, plain, target_kv: str, draft_kv: str
) -> None:
    llm = make_llm(pair, kv_cache_dtype=target_kv, draft_kv=draft_kv, **OPTIONS)
    assert generate(llm, pair) == plain(target_kv)
    assert_some_stood_and_some_did_not(llm)


def test_steps_with_drafts_are_recorded(pair: Pair) -> None:
    llm = make_llm(pair, kv_cache_dtype="fp8", **OPTIONS)
    assert llm.engine.runner.num_drafts(10) == [4, 0]


def test_prompt_lookup_gives_the_tokens_of_plain_decoding(pair: Pair, plain) -> None:
    llm = make_llm(pair, method="ngram", kv_cache_dtype="fp8", **OPTIONS)
    assert generate(llm, pair) == plain("fp8")
