"""Qwen3-Next and Qwen3.5: most layers are recurrent (gated delta net), every fourth attends.

Recurrent layers keep no KV: their states have one size per sequence.
transformers' AutoModelForCausalLM makes the text model of a Qwen3.5 checkpoint, without its tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvant.kv.geometry import Attention, LayerGeometry, StateGeometry, StateKind
from kvant.models.geometry.family import NORMS, Family, Layers, attention_layer
from kvant.models.geometry.fields import MAX_LAYERS, Fields
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import (
    QKNorm,
    Weight,
    attention,
    experts,
    linear,
    mlp,
    norms,
    other,
    router,
    vector,
)
from kvant.models.geometry.qwen import is_sparse
from kvant.models.geometry.renaming import (
    OF_ALL,
    OF_EXPERTS,
    OF_TEXT,
    WITH_EXPERTS,
    NameRules,
)
from kvant.models.geometry.windows import LayerType, full_every

_HEAD_DIM = 256  # the classes' default
_INTERVAL = 4  # of layers that attend
_SILU = (None, "silu", "swish")
"""Names of silu in configs; None is the classes' default."""


def _layers(fields: Fields, prefix: str) -> Layers:
    heads = read_heads(fields, head_dim=_HEAD_DIM)
    interval = fields.optional_integer("full_attention_interval", most=MAX_LAYERS) or _INTERVAL
    kinds = full_every(fields, interval, LayerType.LINEAR)
    states = _states(fields)
    if LayerType.LINEAR in kinds and fields.raw("hidden_act") not in _SILU:
        raise fields.bad("hidden_act", "Kvant's gated delta nets compute silu alone")
    return tuple(
        attention_layer(index, prefix, heads, None)
        if kind is LayerType.FULL
        else LayerGeometry(index, f"{prefix}.{index}.linear_attn", Attention.NONE, states=states)
        for index, kind in enumerate(kinds)
    )


def _states(fields: Fields) -> tuple[StateGeometry, ...]:
    """Returns the states: the last inputs of the convolution, and a matrix [values, keys] for each head."""
    heads, values = (
        fields.integer("linear_num_value_heads"),
        fields.integer("linear_value_head_dim"),
    )
    keys = fields.integer("linear_key_head_dim")
    key_heads = fields.integer("linear_num_key_heads")
    if heads % key_heads:
        raise fields.bad(
            "linear_num_value_heads", f"{key_heads} heads of keys serve them in equal parts"
        )
    before = fields.integer("linear_conv_kernel_dim") - 1
    return (
        StateGeometry(StateKind.CONV, (before, 2 * key_heads * keys + heads * values)),
        StateGeometry(StateKind.RECURRENT, (heads, values, keys)),
    )


def _mixers(
    fields: Fields, layer: LayerGeometry, hidden: int, at: str, *, joined: bool = False
) -> Iterator[Weight]:
    """Attention (its q_proj makes an output gate too) or the gated delta net of one layer.

    joined: the net's four projections are two matrices.
    """
    yield from norms(at, hidden, *NORMS)
    if layer.attention is not Attention.NONE:
        bias = fields.flag("attention_bias")
        yield from attention(
            layer, hidden, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.HEAD, gated=True
        )
        return
    num_v, head_v = (
        fields.integer("linear_num_value_heads"),
        fields.integer("linear_value_head_dim"),
    )
    keys = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim")
    values = num_v * head_v
    name = layer.name
    if joined:
        yield from linear(f"{name}.in_proj_qkvz", 2 * keys + 2 * values, hidden)
        yield from linear(f"{name}.in_proj_ba", 2 * num_v, hidden)
    else:
        yield from linear(f"{name}.in_proj_qkv", 2 * keys + values, hidden)
        yield from linear(f"{name}.in_proj_z", values, hidden)
        yield from linear(f"{name}.in_proj_b", num_v, hidden)
        yield from linear(f"{name}.in_proj_a", num_v, hidden)
    yield from linear(f"{name}.out_proj", hidden, values)
    kernel = fields.integer("linear_conv_kernel_dim")
    yield other(f"{name}.conv1d", 2 * keys + values, 1, kernel)
    yield vector(f"{name}.dt_bias", num_v)
    yield vector(f"{name}.A_log", num_v)
    yield vector(f"{name}.norm", head_v)


def _dense_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    for layer in layers:
        at = layer.name.rpartition(".")[0]
        yield from _mixers(fields, layer, hidden, at)
        yield from mlp(f"{at}.mlp", hidden, intermediate)


def _moe_weights(fields: Fields, layers: Layers, *, joined: bool = False) -> Iterator[Weight]:
    """Routed experts, and one expert for every token behind a gate of its own."""
    hidden = fields.integer("hidden_size")
    count = fields.integer("num_experts", least=0)
    size = fields.integer("moe_intermediate_size")
    shared = fields.integer("shared_expert_intermediate_size", least=0)
    for layer in layers:
        at = layer.name.rpartition(".")[0]
        yield from _mixers(fields, layer, hidden, at, joined=joined)
        if is_sparse(fields, layer.index):
            yield router(f"{at}.mlp.gate", count, hidden)
            yield from experts(f"{at}.mlp", count, hidden, size)
            yield from mlp(f"{at}.mlp.shared_expert", hidden, shared)
            yield router(f"{at}.mlp.shared_expert_gate", 1, hidden)
        else:
            yield from mlp(f"{at}.mlp", hidden, fields.integer("intermediate_size"))


_CONV = {"linear_conv_kernel_dim": 4}

_TEXT = NameRules((*OF_TEXT, *OF_ALL))
_TEXT_WITH_EXPERTS = NameRules((*OF_TEXT, *OF_EXPERTS, *OF_ALL))

QWEN3_NEXT = Family(
    "Qwen3-Next", ("qwen3_next",), ("Qwen3NextForCausalLM",), _layers,
    partial(_moe_weights, joined=True), defaults=_CONV, names=WITH_EXPERTS,
)  # fmt: skip
QWEN3_5_TEXT = Family(
    "Qwen3.5 text", ("qwen3_5_text",), ("Qwen3_5ForCausalLM",), _layers, _dense_weights,
    defaults=_CONV, names=_TEXT,
)  # fmt: skip
QWEN3_5 = Family(
    "Qwen3.5", ("qwen3_5",), ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    _layers, _dense_weights, in_text_config=True, defaults=_CONV, names=_TEXT,
)  # fmt: skip
QWEN3_5_MOE_TEXT = Family(
    "Qwen3.5-MoE text", ("qwen3_5_moe_text",), ("Qwen3_5MoeForCausalLM",), _layers, _moe_weights,
    defaults=_CONV, names=_TEXT_WITH_EXPERTS,
)  # fmt: skip
QWEN3_5_MOE = Family(
    "Qwen3.5-MoE", ("qwen3_5_moe",),
    ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    _layers, _moe_weights, in_text_config=True, defaults=_CONV, names=_TEXT_WITH_EXPERTS,
)  # fmt: skip
