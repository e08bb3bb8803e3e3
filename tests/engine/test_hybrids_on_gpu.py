"""Models with recurrent layers on a GPU give the CPU's tokens: python -m pytest -m gpu here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant import SamplingParams
from kvant.engine.llm import LLM
from tests.engine.test_hybrids import answers, models, opened, texts
from tests.models import families
from tests.speculative import scripted

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


@pytest.mark.parametrize(
    ("name", "stored", "weights"),
    [
        ("qwen3_5_text", "float32", None),
        ("qwen3_5_text", "int8_per_token_head", None),
        ("qwen3_5_text", "float32", "fp8"),
        ("granitemoehybrid", "float32", None),
        ("lfm2", None, None),
        ("lfm2", None, "int8"),
        ("qwen3_next", "bfloat16", None),
        ("bamba", "fp8_per_token_head", None),
        ("bamba", "float32", "fp8"),
    ],
)
def test_in_batch_invariant_mode_bits_do_not_depend_on_how_steps_are_made(
    tmp_path: Path, name: str, stored: str | None, weights: str | None
) -> None:
    """Alone, in recorded batches, in pieces, from the prefix cache, preempted, and with drafts."""
    families.build(name, tmp_path)
    prompts = [[5 + (i * i + n) % 90 for i in range(n)] for n in (70, 1, 400, 129, 17, 33)]
    counts = [20 - 3 * i for i in range(len(prompts))]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=2) for n in counts
    ]
    given: dict[str, object] = {
        "device": "cuda", "dtype": "bfloat16", "batch_invariant": True, "page_size": 16,
        "kv_cache_memory": "64MiB", "max_model_len": 500, "state_dtype": stored,
        "quantization": weights,
    }  # fmt: skip

    def numbers(llm: LLM, some: list[list[int]], wanted: list[SamplingParams]) -> list[object]:
        found = llm.generate(some, wanted)
        llm.engine.audit()
        return [(list(one.token_ids), one.logprobs) for one in found]

    alone = opened(tmp_path, **given, max_num_seqs=1, enable_prefix_caching=False)
    expected = [numbers(alone, [p], [one])[0] for p, one in zip(prompts, params, strict=True)]
    together = opened(tmp_path, **given, max_num_seqs=6, max_num_batched_tokens=67)
    assert numbers(together, prompts, params) == expected
    assert numbers(together, prompts, params) == expected  # from the prefix cache
    least = together.planned.bytes_for(500)
    tight = opened(tmp_path, **{**given, "kv_cache_memory": least}, max_num_seqs=6)
    assert numbers(tight, prompts, params) == expected
    asked = {"method": "tests.speculative.scripted:METHOD", "num_speculative_tokens": 2}
    drafting = opened(tmp_path, **given, max_num_seqs=6, speculative_config=asked)
    answered = [list(one[0]) for one in expected]  # type: ignore[index]
    known = [prompt + answer for prompt, answer in zip(prompts, answered, strict=True)]
    scripted.speculate(drafting.engine, known, wrong_every=5)
    assert numbers(drafting, prompts, params) == expected
