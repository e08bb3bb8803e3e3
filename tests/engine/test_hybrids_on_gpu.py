"""Models with recurrent layers on a GPU give the CPU's tokens: python -m pytest -m gpu here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


_MANY_ROWS = 4096
"""Rows of heads from which on norms of prompts take tiles of several rows."""


def test_in_batch_invariant_mode_a_long_prompt_gets_the_bits_of_decoding(tmp_path: Path) -> None:
    """With as many and as wide heads as Qwen3.5-9B, so that norms of the prompt have many rows."""
    heads, total = 32, 200
    families.build(
        "qwen3_5_text", tmp_path, linear_num_key_heads=heads // 2, linear_num_value_heads=heads,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    llm = opened(
        tmp_path, device="cuda", dtype="bfloat16", batch_invariant=True, kv_cache_memory="256MiB",
        max_num_seqs=2, enable_prefix_caching=False,
    )  # fmt: skip
    prompt = [5 + i * i % 90 for i in range(3)]
    decode = SamplingParams(
        temperature=0.0, max_tokens=total - len(prompt), ignore_eos=True, logprobs=1
    )
    (decoded,) = llm.generate([prompt], decode)
    text = [*prompt, *decoded.token_ids]
    assert len(text) * heads > _MANY_ROWS > heads * len(prompt)
    read = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (at_once,) = llm.generate([text], read)
    assert at_once.prompt_logprobs is not None
    assert at_once.prompt_logprobs[len(prompt) :] == decoded.logprobs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_of_many_rows_that_must_be_alike_have_the_bits_of_one_row(dtype: torch.dtype) -> None:
    from kvant.models.recurrent.kernels import gated_norm  # only machines with a GPU have Triton

    numbers = torch.Generator("cuda").manual_seed(1)
    x, gate = torch.randn(
        2, 2 * _MANY_ROWS, 128, device="cuda", dtype=dtype, generator=numbers
    ).unbind()
    weight = torch.randn(128, device="cuda", dtype=dtype, generator=numbers)
    together = gated_norm(x, gate, weight, 1e-6, alike=True)
    few = [
        gated_norm(some, beside, weight, 1e-6, alike=True)
        for some, beside in zip(x.split(64), gate.split(64), strict=True)
    ]
    assert torch.equal(together, torch.cat(few))
