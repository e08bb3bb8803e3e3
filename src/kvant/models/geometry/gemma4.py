"""Gemma 4: windowed and full layers with head sizes, and sometimes KV heads, of their own.

Windowed layers have `head_dim` and `num_key_value_heads`; full ones `global_head_dim` (512 without)
and, where `attention_k_eq_v`, `num_global_key_value_heads`. transformers >= 5.17 saves the same as
`per_layer_config`, which then counts alone. The last layer is full, regardless of layer_types.
With attention_k_eq_v the full layers' V is made by K's projection, but normalised and rotated
differently: both are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvant.models.geometry.family import FOUR_NORMS, Family, Layers, attention_layer
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.gemma2 import refuse_encoder
from kvant.models.geometry.gemma3n import per_layer_embedding
from kvant.models.geometry.heads import Heads, read_heads, refuse_uneven
from kvant.models.geometry.parameters import (
    QKNorm,
    Weight,
    attention,
    experts,
    linear,
    mlp,
    norms,
    router,
    vector,
)
from kvant.models.geometry.renaming import OF_ALL, NameRules, renaming
from kvant.models.geometry.towers import gemma4_towers, unified_towers
from kvant.models.geometry.windows import (
    LayerType,
    full_every,
    kv_sources,
    read_window,
    windows_of,
)

# What Gemma4TextConfig takes for fields that a config leaves out.
_DEFAULTS = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
}
_UNIFIED_DEFAULTS = {
    **_DEFAULTS, "sliding_window": 1024, "max_position_embeddings": 262144,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
_PATTERN = 6


def _layers(fields: Fields, prefix: str) -> Layers:
    refuse_encoder(fields)
    kinds = (*full_every(fields, _PATTERN)[:-1], LayerType.FULL)
    _check_rotary(fields, kinds)
    windows = windows_of(fields, kinds, read_window(fields))
    return tuple(
        attention_layer(index, prefix, heads, window, shared_with=source)
        for index, (heads, window, source) in enumerate(
            zip(_heads(fields, kinds), windows, kv_sources(fields, kinds), strict=True)
        )
    )


def _check_rotary(fields: Fields, kinds: Sequence[LayerType]) -> None:
    """Raises BadCheckpoint if a kind of layers has no rotary numbers where the config has any."""
    rope = fields.inside("rope_parameters")
    for kind in dict.fromkeys(kinds) if rope is not None else ():
        assert rope is not None
        section = rope.inside(kind.value)
        if section is None:
            raise rope.bad(kind.value, "layers of this kind rotate by its numbers")
        if not section.has("rope_theta"):
            raise section.bad("rope_theta", "rotary frequencies are powers of it")


def _heads(fields: Fields, kinds: Sequence[LayerType]) -> Sequence[Heads]:
    windowed = read_heads(fields)
    overrides = fields.inside("per_layer_config")
    if overrides is not None:
        return _overridden(fields, overrides, windowed, len(kinds))
    size = fields.integer("global_head_dim")
    full = replace(windowed, head_dim_k=size, head_dim_v=size)
    num_kv = fields.optional_integer("num_global_key_value_heads")
    if num_kv is not None and fields.flag("attention_k_eq_v"):
        refuse_uneven(fields, "num_global_key_value_heads", full.num_q, num_kv)
        full = replace(full, num_kv=num_kv)
    return [full if kind is LayerType.FULL else windowed for kind in kinds]


def _overridden(fields: Fields, overrides: Fields, general: Heads, count: int) -> Sequence[Heads]:
    """`per_layer_config`: {"layer index": {"head_dim": .., "num_key_value_heads": ..}}."""
    heads = [general] * count
    for key in overrides.names():
        if not (key.isdecimal() and len(key) < 6 and int(key) < count):
            raise overrides.bad(key, f"its keys must be layer indices below {count}")
        layer = overrides.inside(key)
        if layer is None:
            continue
        for name in layer.names():
            if name not in ("head_dim", "num_key_value_heads"):
                raise layer.bad(name, "Kvant does not know what it changes about a single layer")
        size = layer.optional_integer("head_dim") or general.head_dim_k
        num_kv = layer.optional_integer("num_key_value_heads") or general.num_kv
        refuse_uneven(layer, "num_key_value_heads", general.num_q, num_kv)
        heads[int(key)] = Heads(general.num_q, num_kv, size, size)
    return heads


def _weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    bias, k_eq_v = fields.flag("attention_bias"), fields.flag("attention_k_eq_v")
    wide = fields.flag("use_double_wide_mlp")
    per_layer = fields.optional_integer("hidden_size_per_layer_input", least=0) or 0
    moe = fields.flag("enable_moe_block")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(
            layer, hidden, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.HEAD,
            k_eq_v=k_eq_v and layer.window is None,
        )  # fmt: skip
        double = wide and layer.shared_with is not None
        yield from mlp(f"{at}.mlp", hidden, intermediate * (2 if double else 1))
        yield from norms(at, hidden, *FOUR_NORMS)
        yield vector(f"{at}.layer_scalar", 1)
        if per_layer:
            yield from linear(f"{at}.per_layer_input_gate", per_layer, hidden)
            yield from linear(f"{at}.per_layer_projection", hidden, per_layer)
            yield from norms(at, hidden, "post_per_layer_input_norm")
        if moe:
            yield from _moe(fields, at, hidden)
    if per_layer:
        at = layers[0].name.rpartition(".layers.")[0]
        yield from per_layer_embedding(fields, at, len(layers), hidden, per_layer)


def _moe(fields: Fields, at: str, hidden: int) -> Iterator[Weight]:
    """Experts beside the layer's feed-forward network, with norms and a scaled router."""
    count = fields.integer("num_experts")
    yield router(f"{at}.router.proj", count, hidden)
    yield vector(f"{at}.router.scale", hidden)
    yield vector(f"{at}.router.per_expert_scale", count)
    yield from experts(at, count, hidden, fields.integer("moe_intermediate_size"))
    yield from norms(
        at, hidden, "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
        "pre_feedforward_layernorm_2",
    )  # fmt: skip


_UNIFIED_NAMES = NameRules((
    renaming(r"vision_embedder\.patch_ln1", to="embed_vision.patch_ln1"),
    renaming(r"vision_embedder\.patch_dense", to="embed_vision.patch_dense"),
    renaming(r"vision_embedder\.patch_ln2", to="embed_vision.patch_ln2"),
    renaming(r"vision_embedder\.pos_embedding", to="embed_vision.pos_embedding"),
    renaming(r"vision_embedder\.pos_norm", to="embed_vision.pos_norm"),
    renaming(
        r"embed_vision\.embedding_projection", to="embed_vision.multimodal_embedder.embedding_projection"
    ),
    *OF_ALL,
))  # fmt: skip

GEMMA4_TEXT = Family(
    "Gemma 4 text", ("gemma4_text",), ("Gemma4ForCausalLM",), _layers, _weights,
    defaults=_DEFAULTS, tied=True, single_layers_differ=True, rotary_by_kind=True,
)  # fmt: skip
GEMMA4 = Family(
    "Gemma 4", ("gemma4",), ("Gemma4ForConditionalGeneration",), _layers, _weights,
    prefix="model.language_model.layers", in_text_config=True, defaults=_DEFAULTS, tied=True,
    single_layers_differ=True, rotary_by_kind=True, towers=gemma4_towers,
)  # fmt: skip
GEMMA4_UNIFIED_TEXT = Family(
    "Gemma 4 unified text", ("gemma4_unified_text",), ("Gemma4UnifiedForCausalLM",),
    _layers, _weights, defaults=_UNIFIED_DEFAULTS, tied=True, single_layers_differ=True, rotary_by_kind=True,
)  # fmt: skip
GEMMA4_UNIFIED = Family(
    "Gemma 4 unified", ("gemma4_unified",), ("Gemma4UnifiedForConditionalGeneration",),
    _layers, _weights, prefix="model.language_model.layers", in_text_config=True,
    defaults=_UNIFIED_DEFAULTS, tied=True,
    single_layers_differ=True, rotary_by_kind=True, towers=unified_towers, names=_UNIFIED_NAMES,
)  # fmt: skip
