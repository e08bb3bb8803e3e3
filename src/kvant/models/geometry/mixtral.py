"""Mixtral: Mistral's attention, eight experts instead of one feed-forward network."""

from __future__ import annotations

from collections.abc import Iterator

from kvant.models.geometry.family import Family, Layers, attention_layers
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import Weight, attention, experts, norms, router
from kvant.models.geometry.windows import every_layer


def _layers(fields: Fields, prefix: str) -> Layers:
    return attention_layers(prefix, read_heads(fields, kv_defaults_to_q=True), every_layer(fields))


def _weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    count = fields.integer("num_local_experts", "num_experts")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden)
        yield router(f"{at}.block_sparse_moe.gate", count, hidden)
        yield from experts(f"{at}.block_sparse_moe", count, hidden, intermediate)
        yield from norms(at, hidden, "input_layernorm", "post_attention_layernorm")


MIXTRAL = Family("Mixtral", ("mixtral",), ("MixtralForCausalLM",), _layers, _weights)
