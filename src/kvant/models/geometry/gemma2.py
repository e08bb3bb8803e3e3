"""Gemma 2 and Gemma 3: windowed and full layers, four norms a layer.

Gemma 2 alternates, beginning with a window, and caps attention scores (`attn_logit_softcapping`).
Gemma 3 has five windowed layers to one full (`sliding_window_pattern` where the config has another
number) and caps nothing: its class reads `attn_logit_softcapping` and does not use it.
"""

from __future__ import annotations

from kvant.models.geometry.family import (
    FOUR_NORMS,
    Family,
    Layers,
    attention_layers,
    dense_weights,
)
from kvant.models.geometry.fields import MAX_LAYERS, Fields
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import QKNorm
from kvant.models.geometry.renaming import OF_ALL, NameRules, Renaming, renaming
from kvant.models.geometry.towers import siglip_tower
from kvant.models.geometry.windows import full_every, read_window, windows_of

_HEAD_DIM = 256  # the classes' default
_SOFTCAP = 50.0  # Gemma2Config's default; null switches it off
_PATTERN = 6


def refuse_encoder(fields: Fields) -> None:
    """Refuses a model that also attends to later tokens: its keys change with every token."""
    value = fields.raw("use_bidirectional_attention")
    if value is True or value == "all":
        raise fields.bad(
            "use_bidirectional_attention", "such a model is an encoder: it keeps no KV cache"
        )


def _refuse_scale(fields: Fields) -> None:
    if fields.number("query_pre_attn_scalar", 1.0) <= 0:
        raise fields.bad("query_pre_attn_scalar", "scores are divided by its square root")


def _gemma2_layers(fields: Fields, prefix: str) -> Layers:
    refuse_encoder(fields)
    _refuse_scale(fields)
    heads = read_heads(fields, head_dim=_HEAD_DIM)
    windows = windows_of(fields, full_every(fields, 2), read_window(fields))
    softcap = 0.0
    if not fields.is_null("attn_logit_softcapping"):
        softcap = fields.number("attn_logit_softcapping", _SOFTCAP)
        if softcap <= 0:
            raise fields.bad("attn_logit_softcapping", "a cap on scores must be above 0, or null")
    return attention_layers(prefix, heads, windows, softcap=softcap)


def _gemma3_layers(fields: Fields, prefix: str) -> Layers:
    refuse_encoder(fields)
    _refuse_scale(fields)
    heads = read_heads(fields, head_dim=_HEAD_DIM)
    pattern = fields.optional_integer("sliding_window_pattern", most=MAX_LAYERS) or _PATTERN
    windows = windows_of(fields, full_every(fields, pattern), read_window(fields))
    return attention_layers(prefix, heads, windows)


_gemma3_weights = dense_weights(reads_bias=True, qk_norm=QKNorm.HEAD, norm_names=FOUR_NORMS)

# Google's configs of multimodal Gemma 3 leave these to transformers' Gemma3TextConfig.
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}

_GEMMA3_NAMES = NameRules((
    renaming(r"^language_model\.lm_head", to="lm_head"),
    renaming(r"^language_model", to="model.language_model"),
    renaming(r"^vision_tower", to="model.vision_tower"),
    renaming(r"^multi_modal_projector", to="model.multi_modal_projector"),
    renaming(r"^language_model\.model", to="language_model", begins=("model.", "")),
    Renaming(r"(?P<g0>^vision_model\.(.+))", (r"\1",), ("model.vision_tower.", "vision_tower.")),
    *OF_ALL,
))  # fmt: skip

GEMMA2 = Family(
    "Gemma 2", ("gemma2",), ("Gemma2ForCausalLM",), _gemma2_layers,
    dense_weights(reads_bias=True, norm_names=FOUR_NORMS),
    defaults={"sliding_window": 4096}, tied=True,
)  # fmt: skip
GEMMA3_TEXT = Family(
    "Gemma 3 text", ("gemma3_text",), ("Gemma3ForCausalLM",), _gemma3_layers, _gemma3_weights,
    defaults=_GEMMA3_DEFAULTS, tied=True, rotary_by_kind=True,
)  # fmt: skip
GEMMA3 = Family(
    "Gemma 3", ("gemma3",), ("Gemma3ForConditionalGeneration",), _gemma3_layers, _gemma3_weights,
    prefix="model.language_model.layers", in_text_config=True, defaults=_GEMMA3_DEFAULTS,
    tied=True, rotary_by_kind=True, towers=siglip_tower, names=_GEMMA3_NAMES,
)  # fmt: skip
