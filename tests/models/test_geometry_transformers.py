"""Geometry read from a config against the model that transformers builds from the same config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvant.kv.geometry import Attention, LayerGeometry, ModelGeometry
from kvant.models.geometry import read_geometry
from tests.models import configs, meta

PROBE = "kvant_geometry_probe"
LENGTH = 11  # more than twice the tiny configs' window


@dataclass(frozen=True, slots=True)
class Seen:
    """What one layer handed to attention."""

    key: Tensor
    value: Tensor
    query: Tensor
    mask: Tensor
    options: dict[str, Any]


@pytest.fixture
def seen() -> dict[int, Seen]:
    """Attention calls by layer index, recorded while a model runs with PROBE."""
    calls: dict[int, Seen] = {}

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        index = module.layer_idx
        assert isinstance(index, int)
        calls[index] = Seen(key, value, query, mask, options)
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return torch.zeros(shape), None

    AttentionInterface.register(PROBE, probe)
    AttentionMaskInterface.register(PROBE, eager_mask)
    return calls


def attending(geometry: ModelGeometry) -> list[LayerGeometry]:
    return [layer for layer in geometry.layers if layer.attention is not Attention.NONE]


@pytest.mark.parametrize("name", configs.TINY_NAMES)
def test_layers_are_the_attention_modules_of_the_model(name: str) -> None:
    config = configs.tiny(name)
    model = meta.build(config)
    geometry = read_geometry(config)
    # Towers have modules of that name too, without an index into the KV cache.
    modules = {
        path: module
        for path, module in model.named_modules()
        if path.endswith((".self_attn", ".linear_attn"))
        and ".vision_tower." not in path
        and ".audio_tower." not in path
    }
    assert [layer.name for layer in geometry.layers] == list(modules)
    for layer, module in zip(geometry.layers, modules.values(), strict=True):
        assert layer.index == module.layer_idx
        assert layer.name.endswith(".linear_attn") == (layer.attention is Attention.NONE)


@pytest.mark.parametrize("name", [n for n in configs.TINY_NAMES if "deepseek" not in n])
def test_heads_windows_sinks_and_sharing_are_what_layers_hand_to_attention(
    name: str, seen: dict[int, Seen]
) -> None:
    config = configs.tiny(name)
    geometry = read_geometry(config)
    model = meta.build(config, device="cpu", attention=PROBE)
    with torch.no_grad():
        model(input_ids=torch.arange(LENGTH)[None] + 3, use_cache=False)
    assert sorted(seen) == [layer.index for layer in attending(geometry)]
    for layer in attending(geometry):
        call = seen[layer.index]
        assert call.query.shape[1] == layer.num_q_heads
        assert call.key.shape == (1, layer.num_kv_heads, LENGTH, layer.head_dim_k)
        assert call.value.shape == (1, layer.num_kv_heads, LENGTH, layer.head_dim_v)
        assert call.options.get("sliding_window") == layer.window
        assert (call.options.get("s_aux") is not None) == layer.sinks
        assert (call.options.get("softcap") or 0.0) == layer.softcap
        source = layer.index if layer.shared_with is None else layer.shared_with
        assert call.key.data_ptr() == seen[source].key.data_ptr()


@pytest.mark.parametrize("name", [n for n in configs.TINY_NAMES if "deepseek" not in n])
def test_a_window_counts_the_tokens_that_transformers_mask_lets_a_query_see(
    name: str, seen: dict[int, Seen]
) -> None:
    config = configs.tiny(name)
    model = meta.build(config, device="cpu", attention=PROBE)
    with torch.no_grad():
        model(input_ids=torch.arange(LENGTH)[None] + 3, use_cache=False)
    for layer in attending(read_geometry(config)):
        visible = (seen[layer.index].mask[0, 0] == 0).sum(dim=-1)
        widest = layer.window or LENGTH
        assert visible.tolist() == [min(n, widest) for n in range(1, LENGTH + 1)]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_mla_stores_the_output_of_the_projection_to_the_latent(name: str) -> None:
    config = configs.tiny(name)
    model = meta.build(config)
    for layer in read_geometry(config).layers:
        module = model.get_submodule(layer.name)
        assert layer.attention is Attention.MLA
        assert layer.head_dim_k == module.kv_a_proj_with_mqa.out_features
        assert (layer.num_kv_heads, layer.head_dim_v) == (1, module.kv_lora_rank)
        assert layer.num_q_heads == module.num_heads


@pytest.mark.parametrize("name", configs.TINY_NAMES)
def test_a_config_saved_by_transformers_reads_the_same(name: str) -> None:
    config = configs.tiny(name)
    saved = meta.build(config).config.to_dict()
    assert read_geometry(saved).layers == read_geometry(config).layers


def test_mimos_sliding_window_size_leaves_the_querys_own_token_out() -> None:
    config = {**configs.tiny("mimo"), "sliding_window_size": 6}
    windows = {layer.window for layer in read_geometry(config).layers}
    assert windows == {None, 7}
    theirs = meta.build(config).config.sliding_window
    if theirs == config["sliding_window"]:
        pytest.skip("this release of transformers does not read sliding_window_size")
    assert theirs == 7
