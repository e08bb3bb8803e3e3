"""Weights of a DFlash drafter: its layers, and the projection of the target's hidden states.

z-lab's drafters bring nothing else: they embed and score tokens with the target's matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvant.kv.geometry import ModelGeometry
from kvant.models.geometry.fields import MAX_LAYERS, Fields
from kvant.models.geometry.parameters import QKNorm, Weight, attention, linear, mlp, norms


def draft_weights(config: Mapping[str, Any], geometry: ModelGeometry) -> Iterator[Weight] | str:
    """Every weight, or why they cannot be listed."""
    top = Fields(config)
    dflash = top.inside("dflash_config")
    if dflash is None:
        return (
            "Kvant does not know what a speculators checkpoint brings beside the drafter's layers"
        )
    return _z_lab_weights(top, dflash, geometry)


def _z_lab_weights(top: Fields, dflash: Fields, geometry: ModelGeometry) -> Iterator[Weight]:
    hidden, intermediate = geometry.hidden_size, top.integer("intermediate_size")
    bias = top.flag("attention_bias")
    for layer in geometry.layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.HEAD)
        yield from mlp(f"{at}.mlp", hidden, intermediate)
        yield from norms(at, hidden, "input_layernorm", "post_attention_layernorm")
    ids = dflash.integers("target_layer_ids", most=MAX_LAYERS)
    yield from linear("fc", hidden, hidden * len(ids or geometry.layers))
    yield from norms("", hidden, "hidden_norm", "norm")
