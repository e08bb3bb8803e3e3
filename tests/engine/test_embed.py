"""Embeddings are the last token's hidden state, as transformers computes it, in any batch and any chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from kvant import LLM, SamplingParams
from kvant.errors import NotServable, RequestError
from kvant.models.hub_files import small_files
from kvant.models.pooling import Pooling, Task, choose_pooling
from tests.models import families, tiny

PROMPTS = [
    [3 + (7 * n + i) % 120 for i in range(length)] for n, length in enumerate((5, 1, 40, 23))
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory": "8MB", "device": "cpu", "max_model_len": 128,
}  # fmt: skip


def expected(path: Path, prompt: list[int]) -> NDArray[np.float32]:
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    model = getattr(model, "language_model", model)
    with torch.no_grad():
        hidden = model(torch.tensor([prompt])).last_hidden_state[0, -1]
    found: NDArray[np.float32] = hidden.numpy()
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_moe"])
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path = tiny.build(family, tmp_path)
    llm = LLM(path, task="embed", max_num_batched_tokens=16, page_size=4, **OPTIONS)
    found = llm.embed(PROMPTS, normalize=False)
    for prompt, vector in zip(PROMPTS, found, strict=True):
        np.testing.assert_allclose(vector, expected(path, prompt), atol=2e-4, rtol=2e-3)
    (alone,) = llm.embed(PROMPTS[2], normalize=False)
    np.testing.assert_allclose(alone, found[2], atol=1e-5)
    assert llm.metrics()["num_steps"] > 4, "the longest prompt runs in chunks"


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_vectors_of_models_with_recurrent_layers(name: str, tmp_path: Path) -> None:
    """States go on from chunk to chunk, and from a prefix in the cache."""
    path = tmp_path / name
    families.build(name, path)
    given = {**OPTIONS, "max_model_len": 300, "page_size": 16}
    llm = LLM(path, task="embed", max_num_batched_tokens=41, max_num_seqs=3, **given)
    prompts = [[5 + (i * i + n) % 110 for i in range(n)] for n in (70, 1, 129, 17)]
    found = llm.embed(prompts, normalize=False)
    for prompt, vector in zip(prompts, found, strict=True):
        np.testing.assert_allclose(vector, expected(path, prompt), atol=5e-4, rtol=5e-3)
    (longer,) = llm.embed([*prompts[2], 7, 8], normalize=False)
    whole = expected(path, [*prompts[2], 7, 8])
    np.testing.assert_allclose(longer, whole, atol=5e-4, rtol=5e-3)
    llm.engine.audit()


def test_a_family_with_more_behind_its_last_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotServable, match="Gemma3n"):
        LLM(tiny.build("gemma3n", tmp_path), task="embed", **OPTIONS)


def test_vectors_have_length_one_and_share_a_prefix(tmp_path: Path) -> None:
    path = tiny.build("qwen3", tmp_path)
    llm = LLM(path, task="embed", page_size=4, **OPTIONS)
    first = llm.embed(PROMPTS[2])[0]
    before = llm.metrics()["num_computed_tokens"]
    again = llm.embed(PROMPTS[2])[0]
    assert llm.metrics()["num_computed_tokens"] - before < 8, "the pages are in the prefix cache"
    np.testing.assert_allclose(first, again, atol=1e-6)
    whole = expected(path, PROMPTS[2])
    np.testing.assert_allclose(first, whole / np.linalg.norm(whole), atol=1e-4)
    with pytest.raises(RequestError, match="generates nothing"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=4))
    with pytest.raises(RequestError, match="is_matryoshka"):
        llm.embed(PROMPTS[0], dimensions=8)
    with pytest.raises(RequestError, match="prompt is empty"):
        llm.embed([[]])


def test_narrow_pages_change_vectors_little(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    options = {**OPTIONS, "kv_cache_dtype": "fp8_per_token_head"}
    (found,) = LLM(path, task="embed", **options).embed(PROMPTS[2])
    (wide,) = LLM(path, task="embed", **OPTIONS).embed(PROMPTS[2])
    assert 0.97 < float(found @ wide) < 0.999999


def sentence_files(path: Path, *kinds: str, **pooling: Any) -> None:
    modules = [
        {"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_a_checkpoint_of_sentence_transformers_embeds_by_itself(tmp_path: Path) -> None:
    """Its weights are those of the decoder alone, without `model.` in their names."""
    path = tiny.build("qwen3", tmp_path, tie_word_embeddings=True)
    bare = AutoModel.from_pretrained(path, dtype=torch.float32)
    bare.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "matryoshka_dimensions": [8, 16]}
    (path / "config.json").write_text(json.dumps(config))
    sentence_files(path, "Transformer", "Pooling", "Normalize", pooling_mode_lasttoken=True)
    llm = LLM(path, **OPTIONS)
    (found,) = llm.embed(PROMPTS[0], dimensions=16)
    whole = expected(path, PROMPTS[0])[:16]
    np.testing.assert_allclose(found, whole / np.linalg.norm(whole), atol=1e-4)
    assert LLM(path, task="generate", **OPTIONS).generate(PROMPTS[0])[0].token_ids


@pytest.mark.parametrize(
    ("kinds", "pooling", "says"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True}, "pools by mean_tokens"),
        (("Transformer", "Pooling"), {"pooling_mode": "cls"}, "pools by cls"),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_lasttoken": True}, "lists Dense"),
        ((), {"pooling_mode_lasttoken": True}, "lists nothing"),
    ],
    ids=str,
)
def test_other_poolings_are_refused_with_a_way_out(
    kinds: tuple[str, ...], pooling: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tiny.build("llama", tmp_path)
    sentence_files(path, *kinds, **pooling)
    with pytest.raises(NotServable, match=says) as refused:
        LLM(path, **OPTIONS)
    assert refused.value.ways_out[0].arguments == ("--task", "generate")
    assert choose_pooling(Task.GENERATE, path, {}, 64) is None


def test_what_an_embedding_engine_cannot_have_is_refused(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(NotServable, match="no drafter"):
        LLM(path, task="embed", speculative_config=drafts, **OPTIONS)
    with pytest.raises(RequestError, match='task="embed"'):
        LLM(path, **OPTIONS).embed(PROMPTS[0])


def test_dimensions_follow_the_checkpoint() -> None:
    assert [Pooling(8).allows(n) for n in (4, 8, 9)] == [False, True, False]
    listed = Pooling(8, (2, 4))
    assert [listed.allows(n) for n in (2, 3, 4, 8)] == [True, False, True, True]
    assert [Pooling(8, any_dimension=True).allows(n) for n in (1, 8, 9)] == [True, True, False]


def test_the_file_that_says_how_to_pool_is_fetched() -> None:
    names = {"1_Pooling/config.json": 1, "2_Dense/config.json": 1, "modules.json": 1}
    assert small_files(names) == ["1_Pooling/config.json", "modules.json"]
