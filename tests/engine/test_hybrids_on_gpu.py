"""Models with recurrent layers on a GPU give the CPU's tokens: python -m pytest -m gpu here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_hybrids import answers, models, opened, texts

pytestmark = pytest.mark.gpu
__all__ = ["models"]  # the fixture


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_a_gpu_gives_the_tokens_of_a_cpu(models: dict[str, Path], name: str) -> None:
    expected = texts(opened(models[name], max_num_seqs=8))
    # Recorded decodes, prompts cut at other places, and sequences that lose their pages and states.
    given: dict[str, object] = {"device": "cuda", "kv_cache_memory": "32MiB"}
    for options in ({"max_num_seqs": 8}, {"max_num_seqs": 3, "max_num_batched_tokens": 41}):
        assert texts(opened(models[name], **given, **options)) == expected
    given |= {"max_num_seqs": 4, "max_model_len": 200, "page_size": 16}
    tight = opened(models[name], **given)
    least = tight.planned.bytes_for(200)
    assert texts(opened(models[name], **{**given, "kv_cache_memory": least})) == expected


def test_hits_give_the_tokens_of_cold_runs(models: dict[str, Path]) -> None:
    text = [5 + (i * i + 3 * i) % 110 for i in range(260)]
    prompts = [text[:200], text[:200], [*text[:200], 7, 8, 9], text[:230]]
    given: dict[str, object] = {"device": "cuda", "kv_cache_memory": "32MiB", "max_num_seqs": 4}
    cold = opened(models["qwen3_5_text"], enable_prefix_caching=False, **given)
    found = answers(opened(models["qwen3_5_text"], **given), prompts)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in answers(cold, prompts)]
    assert [cached for _, cached in found] == [0, 192, 192, 192]
