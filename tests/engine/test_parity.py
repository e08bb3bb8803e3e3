"""Through the whole engine, greedy tokens are those of transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvant import LLM, SamplingParams
from kvant.errors import NotServable
from kvant.models.locate import locate
from tests.models import tiny

PROMPTS = [
    [3 + (7 * i + j * j) % 120 for j in range(length)] for i, length in enumerate((1, 5, 30))
]
NUM_TOKENS = 20
NOT_RUNNABLE = "mimo_v2_flash"


def by_transformers(path: Path | str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Each prompt alone, greedily, the EOS token included and nothing after it."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def by_kvant(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    return [list(result.token_ids) for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES.keys() - {NOT_RUNNABLE}))
def test_every_family_gives_transformers_tokens(family: str, tmp_path: Path) -> None:
    path = tiny.build(family, tmp_path)
    expected = by_transformers(path, PROMPTS, NUM_TOKENS)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    llm = LLM(
        path, dtype="float32", kv_cache_dtype="float32", kv_cache_memory="4MiB", page_size=4,
        max_num_batched_tokens=13,
    )  # fmt: skip
    assert by_kvant(llm, PROMPTS, NUM_TOKENS) == expected
    assert llm.generate(PROMPTS[2], SamplingParams(temperature=0))[0].num_cached_tokens == 28
    llm.engine.audit()


def test_what_can_only_be_planned_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.build(NOT_RUNNABLE, tmp_path)
    monkeypatch.setattr("kvant.models.load.load_model", None)  # calling it would be a TypeError
    with pytest.raises(NotServable, match="can be planned, but not run yet"):
        LLM(path, kv_cache_memory="4MiB")


@pytest.mark.slow
def test_smollm2_gives_transformers_tokens() -> None:
    llm = LLM("smollm2", dtype="float32", kv_cache_dtype="float32", kv_cache_memory="256MiB")
    prompts = [
        list(llm.encode(text))
        for text in (
            "The capital of France is",
            "Once upon a time, in a village by the sea,",
            "def fibonacci(n):\n",
            "Die Hauptstadt von Deutschland ist",
            "1, 2, 3, 4,",
        )
    ]
    # The engine keeps the file's 4-bit codes, which transformers cannot read.
    numbers = locate(llm.planned.target.local.name).path
    assert by_kvant(llm, prompts, 48) == by_transformers(numbers, prompts, 48)
