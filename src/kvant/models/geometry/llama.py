"""Llama and models of the same shape: Mistral, Ministral, Phi-3, OLMo 2.

Windows: Llama and OLMo 2 have none; Mistral and Phi-3 have one on every layer where `sliding_window` is
a number. A Mistral with `layer_types` is a Ministral to transformers, with any model_type: it has
the window on its sliding layers only. Phi-3's class does not read `layer_types`.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvant.models.geometry.family import Family, Layers, attention_layers
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import QKNorm, Weight, attention, mlp, norms
from kvant.models.geometry.windows import (
    LayerType,
    every_layer,
    num_layers,
    read_layer_types,
    read_window,
    windows_of,
)


def _full(fields: Fields, prefix: str) -> Layers:
    heads = read_heads(fields, kv_defaults_to_q=True)
    return attention_layers(prefix, heads, (None,) * num_layers(fields))


def _phi3(fields: Fields, prefix: str) -> Layers:
    heads = read_heads(fields, kv_defaults_to_q=True)
    return attention_layers(prefix, heads, every_layer(fields))


def _mistral(fields: Fields, prefix: str) -> Layers:
    heads, window = read_heads(fields, kv_defaults_to_q=True), read_window(fields)
    kind = LayerType.FULL if window is None else LayerType.SLIDING
    kinds = read_layer_types(fields, (kind,) * num_layers(fields))
    return attention_layers(prefix, heads, windows_of(fields, kinds, window))


def _llama_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden, qkv_bias=bias, o_bias=bias)
        yield from mlp(f"{at}.mlp", hidden, intermediate, bias=mlp_bias)
        yield from norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _plain_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    """No biases, regardless of the config."""
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden)
        yield from mlp(f"{at}.mlp", hidden, intermediate)
        yield from norms(at, hidden, "input_layernorm", "post_attention_layernorm")


def _olmo2_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    bias = fields.flag("attention_bias")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.ROW)
        yield from mlp(f"{at}.mlp", hidden, intermediate)
        yield from norms(at, hidden, "post_attention_layernorm", "post_feedforward_layernorm")


LLAMA = Family("Llama", ("llama",), ("LlamaForCausalLM",), _full, _llama_weights)
MISTRAL = Family(
    "Mistral", ("mistral", "ministral"), ("MistralForCausalLM", "MinistralForCausalLM"),
    _mistral, _plain_weights,
)  # fmt: skip
PHI3 = Family("Phi-3", ("phi3",), ("Phi3ForCausalLM",), _phi3, _plain_weights)
OLMO2 = Family("OLMo 2", ("olmo2",), ("Olmo2ForCausalLM",), _full, _olmo2_weights)
