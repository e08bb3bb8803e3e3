"""Gemma 2 and Gemma 3: windowed and full layers, four norms a layer.

Gemma 2 alternates, beginning with a window, and caps attention scores (`attn_logit_softcapping`).
Gemma 3 has five windowed layers to one full (`sliding_window_pattern` where the config has another
number) and caps nothing: its class reads `attn_logit_softcapping` and does not use it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvant.models.geometry.family import Family, Layers, attention_layers
from kvant.models.geometry.fields import MAX_LAYERS, Fields
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import QKNorm, Weight, attention, mlp, norms
from kvant.models.geometry.towers import siglip_tower
from kvant.models.geometry.windows import (
    LayerType,
    every_nth_is,
    num_layers,
    read_layer_types,
    read_window,
    windows_of,
)

_HEAD_DIM = 256  # the classes' default
_SOFTCAP = 50.0  # Gemma2Config's default; null switches it off
_PATTERN = 6

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def refuse_encoder(fields: Fields) -> None:
    """Refuse a model that also attends to later tokens: its keys change with every token."""
    value = fields.raw("use_bidirectional_attention")
    if value is True or value == "all":
        raise fields.bad(
            "use_bidirectional_attention", "such a model is an encoder: it keeps no KV cache"
        )


def _gemma2_layers(fields: Fields, prefix: str) -> Layers:
    refuse_encoder(fields)
    heads = read_heads(fields, head_dim=_HEAD_DIM)
    alternating = every_nth_is(LayerType.FULL, LayerType.SLIDING, 2, num_layers(fields))
    kinds = read_layer_types(fields, alternating)
    windows = windows_of(fields, kinds, read_window(fields))
    softcap = 0.0
    if not fields.is_null("attn_logit_softcapping"):
        softcap = fields.number("attn_logit_softcapping", _SOFTCAP)
        if softcap <= 0:
            raise fields.bad("attn_logit_softcapping", "a cap on scores must be above 0, or null")
    return attention_layers(prefix, heads, windows, softcap=softcap)


def _gemma3_layers(fields: Fields, prefix: str) -> Layers:
    refuse_encoder(fields)
    heads = read_heads(fields, head_dim=_HEAD_DIM)
    pattern = fields.optional_integer("sliding_window_pattern", most=MAX_LAYERS) or _PATTERN
    default = every_nth_is(LayerType.FULL, LayerType.SLIDING, pattern, num_layers(fields))
    kinds = read_layer_types(fields, default)
    windows = windows_of(fields, kinds, read_window(fields))
    return attention_layers(prefix, heads, windows)


def _weights(fields: Fields, layers: Layers, qk_norm: QKNorm) -> Iterator[Weight]:
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    bias = fields.flag("attention_bias")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
        yield from mlp(f"{at}.mlp", hidden, intermediate)
        yield from norms(at, hidden, *NORMS)


def _gemma2_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    return _weights(fields, layers, QKNorm.NONE)


def _gemma3_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    return _weights(fields, layers, QKNorm.HEAD)


# Google's configs of multimodal Gemma 3 leave these to transformers' Gemma3TextConfig.
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}

GEMMA2 = Family(
    "Gemma 2", ("gemma2",), ("Gemma2ForCausalLM",), _gemma2_layers, _gemma2_weights,
    defaults={"sliding_window": 4096}, tied=True,
)  # fmt: skip
GEMMA3_TEXT = Family(
    "Gemma 3 text", ("gemma3_text",), ("Gemma3ForCausalLM",), _gemma3_layers, _gemma3_weights,
    defaults=_GEMMA3_DEFAULTS, tied=True,
)  # fmt: skip
GEMMA3 = Family(
    "Gemma 3", ("gemma3",), ("Gemma3ForConditionalGeneration",), _gemma3_layers, _gemma3_weights,
    prefix="model.language_model.layers", in_text_config=True, defaults=_GEMMA3_DEFAULTS,
    tied=True, towers=siglip_tower,
)  # fmt: skip
