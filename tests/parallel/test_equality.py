"""Two ranks answer as one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvant import LLM, SamplingParams
from kvant.kv.dtype import KVDtype
from kvant.kv.names import known_names
from tests.models import tiny

PROMPTS = ([3, 17, 5, 90, 41], [7], list(range(20, 43)), [(7 * i) % 97 + 3 for i in range(40)])
FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "mixtral", "gemma2", "gemma3",
    "gpt_oss", "phi3", "olmo2",
)  # fmt: skip
FAST = ("llama", "gpt_oss", "olmo2")
EIGHT_BIT = [
    d.format.name for d in KVDtype if d.format.name in known_names() and "8" in d.format.name
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def make(path: Path, size: int, **options: Any) -> LLM:
    return LLM(
        path, tensor_parallel_size=size, device="cpu",
        **{"kv_cache_memory": "2MiB", "max_num_seqs": 8, "dtype": "float32", **options},
    )  # fmt: skip


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in FAMILIES]
)
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    path = tiny.build(name, tmp_path)
    two = make(path, 2)
    assert tokens(two) == tokens(make(path, 1, attention_backend="reference"))
    assert two.planned.division is not None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EIGHT_BIT)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_8_bit_format_of_every_family(name: str, dtype: str, tmp_path: Path) -> None:
    path = tiny.build(name, tmp_path)
    options = {"kv_cache_dtype": dtype, "batch_invariant": name not in ("mixtral", "qwen3_moe")}
    assert tokens(make(path, 2, **options)) == tokens(make(path, 1, **options))


def test_four_ranks_replicate_two_kv_heads(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    four = make(path, 4, kv_cache_dtype="fp8_per_token_head")
    one = make(path, 1, kv_cache_dtype="fp8_per_token_head")
    assert tokens(four) == tokens(one)
    assert four.planned.division is not None
    assert any("2 ranks store each of the 2" in line for line in four.planned.division.replicated)
    assert four.planned.page_bytes * 2 == one.planned.page_bytes


def test_a_tied_head_is_divided_too(tmp_path: Path) -> None:
    path = tiny.build("qwen3", tmp_path, tie_word_embeddings=True, vocab_size=131)
    assert tokens(make(path, 2)) == tokens(make(path, 1))


def test_random_weights_are_those_of_one_device(tmp_path: Path) -> None:
    path = tiny.build("qwen3_moe", tmp_path)
    two, one = (make(path, size, load_format="dummy") for size in (2, 1))
    assert tokens(two) == tokens(one)
