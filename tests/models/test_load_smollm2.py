"""A real model: SmolLM2's greedy tokens through pages are those of transformers' own generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvant.attention.reference.backend import backend
from kvant.errors import ModelNotFound
from kvant.kv.dtype import KVDtype
from kvant.models.geometry import read_geometry
from kvant.models.loaded import LoadedModel
from kvant.models.locate import locate
from kvant.models.quiet import quiet_transformers
from kvant.models.tokenizer import load_tokenizer
from tests.attention import driver
from tests.models import loading

NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is", "Once upon a time, in a small village,", "def fibonacci(n):",
    "Water boils at", "The three primary colours are", "Dear Sir or Madam,", "1, 1, 2, 3, 5, 8,",
    "In 1969, humans first", "The recipe for pancakes needs", "My favourite book is",
    "The opposite of hot is", "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE", "The mitochondria is", "Q: What is 7 times 8?\nA:",
    "To be, or not to be,", "The largest planet in our solar system", "Roses are red,",
    "import numpy as np\n", "A list of European countries:",
)  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return locate("smollm2").path
    except ModelNotFound as missing:
        pytest.skip(f"the demo model is not installed: {missing}")


def load(path: Path, k: KVDtype) -> LoadedModel:
    geometry = read_geometry(json.loads((path / "config.json").read_text()))
    plan = driver.plan(geometry.layers, k)
    return loading.load(path, plan, geometry)


def generated_by_transformers(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """One prompt at a time, to the full length, also past an end-of-sequence token."""
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        texts = [
            model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)
            for prompt in prompts
        ]
    return [t[0, len(p) :].tolist() for t, p in zip(texts, prompts, strict=True)]


@pytest.mark.slow
def test_smollm2s_greedy_float32_tokens_are_those_of_transformers(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    model = load(path, KVDtype.FLOAT32)
    pool = driver.pool(model.plan, 1 + 8 * len(prompts))
    found = driver.greedy(model, pool, backend(), prompts, NUM_TOKENS, chunk=5)
    assert found == generated_by_transformers(path, prompts)


@pytest.mark.parametrize("dtype", [KVDtype.BFLOAT16, KVDtype.INT8_PER_TOKEN_HEAD], ids=str)
def test_smollm2_knows_the_capital_of_france_from_a_narrow_cache(
    path: Path, dtype: KVDtype
) -> None:
    tokenizer = load_tokenizer(path)
    model = load(path, dtype)
    prompt = tokenizer("The capital of France is")["input_ids"]
    (found,) = driver.greedy(model, driver.pool(model.plan, 4), backend(), [prompt], 4, chunk=100)
    assert "Paris" in str(tokenizer.decode(found))
