"""Models of every family, loaded from disk and driven through pages, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvant.attention.reference.backend import backend
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.geometry import read_geometry
from kvant.models.loaded import LoadedModel
from kvant.models.quiet import quiet_transformers
from kvant.models.read_shape import read_shape
from tests.attention import driver
from tests.models import families, loading, tiny, tiny_multimodal

CPU = torch.device("cpu")
NUM_TOKENS = 24  # with the longest prompt three windows and a half
PROMPTS = ([3, 17, 5, 90, 41], [7], list(range(20, 43)))


def load(name: str, directory: Path, k: KVDtype = KVDtype.FLOAT32) -> LoadedModel:
    path = tiny.build(name, directory)
    geometry = tiny.geometry(name)
    return loading.load(path, driver.plan(geometry.layers, k), geometry)


def generated_by_kvant(model: LoadedModel, chunk: int) -> list[list[int]]:
    pool = driver.pool(model.plan, 32)
    return driver.greedy(model, pool, backend(), PROMPTS, NUM_TOKENS, chunk=chunk)


def generated_by_transformers(path: Path) -> list[list[int]]:
    """transformers' own generate, one prompt at a time, with its own eager attention and cache."""
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32
        )
        model.generation_config.eos_token_id = None  # texts go on to their full length
        texts = [
            model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS)
            for prompt in PROMPTS
        ]
    return [t[0, len(p) :].tolist() for t, p in zip(texts, PROMPTS, strict=True)]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_the_geometry_read_from_the_config_is_the_one_written_by_hand(
    name: str, tmp_path: Path
) -> None:
    path = tiny.build(name, tmp_path)
    read = read_geometry(json.loads((path / "config.json").read_text()))
    assert read.layers == tiny.geometry(name).layers


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_greedy_float32_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    expected = generated_by_transformers(tmp_path / name)
    for chunk in (7, 1000):
        assert generated_by_kvant(model, chunk) == expected


def test_a_mistral_with_layer_types_has_its_window_on_the_sliding_ones(tmp_path: Path) -> None:
    """transformers takes it for a Ministral, under the model_type that Mistral published it with."""
    file = tiny.build("ministral", tmp_path) / "config.json"
    said = json.loads(file.read_text())
    file.write_text(
        json.dumps({**said, "model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    )
    geometry = read_geometry(json.loads(file.read_text()))
    assert geometry.layers == tiny.geometry("ministral").layers
    model = loading.load(file.parent, driver.plan(geometry.layers), geometry)
    assert generated_by_kvant(model, 7) == generated_by_transformers(file.parent)


@pytest.mark.parametrize("left", ["output_router_logits", "return_dict"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_what_training_left_in_a_config_changes_nothing(
    name: str, left: str, tmp_path: Path
) -> None:
    plain = generated_by_kvant(load(name, tmp_path), 1000)
    file = tmp_path / name / "config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, left: left == "output_router_logits"}))
    geometry = tiny.geometry(name)
    again = loading.load(file.parent, driver.plan(geometry.layers), geometry)
    assert generated_by_kvant(again, 1000) == plain


@pytest.mark.parametrize("name", tiny_multimodal.NAMES)
def test_the_text_model_of_a_multimodal_checkpoint_runs_alike(name: str, tmp_path: Path) -> None:
    path = tiny_multimodal.build(name, tmp_path)
    geometry = tiny_multimodal.geometry(name)
    model = loading.load(path, driver.plan(geometry.layers), geometry)
    assert generated_by_kvant(model, chunk=7) == generated_by_transformers(path)


def test_heads_of_which_no_number_rotates_generate_the_tokens_of_transformers(
    tmp_path: Path,
) -> None:
    config = families.build("gpt_neox", tmp_path, num_attention_heads=32)
    geometry = read_shape(config).geometry
    assert geometry.layers[0].head_dim_k == 2
    assert config["rope_parameters"]["partial_rotary_factor"] < 0.5
    model = loading.load(tmp_path, driver.plan(geometry.layers, KVDtype.FLOAT32), geometry)
    assert generated_by_kvant(model, 1000) == generated_by_transformers(tmp_path)


@pytest.mark.parametrize("dtype", [ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16])
@pytest.mark.parametrize("name", ["olmo2", "olmo3", "flex_olmo", "ernie4_5", "ernie4_5_moe"])
def test_families_that_rotate_in_float32_compute_in_16_bits(
    name: str, dtype: ComputeDtype, tmp_path: Path
) -> None:
    geometry = read_shape(families.build(name, tmp_path)).geometry
    plan = driver.plan(geometry.layers, KVDtype[dtype.name], compute=dtype)
    found = families._logits(loading.load(tmp_path, plan, geometry))
    model = families.eager(tmp_path, dtype)
    expected = model(torch.tensor([families.PROMPTS[-1]])).logits[0].detach()
    assert (found.float() - expected.float()).norm() < 0.05 * expected.float().norm()
