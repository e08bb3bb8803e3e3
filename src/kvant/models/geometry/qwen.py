"""Qwen2, Qwen3 and Qwen3-MoE.

Windows: `sliding_window` counts only where `use_sliding_window` is true. Qwen2 and Qwen3 then have
it on the layers that layer_types calls sliding; without layer_types on the layers from
`max_window_layers` on (28 where the config has no number). Qwen3-MoE has it on all layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvant.models.geometry.family import NORMS, Family, Layers, attention_layers, dense_weights
from kvant.models.geometry.fields import MAX_LAYERS, Fields
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import (
    QKNorm,
    Weight,
    attention,
    experts,
    mlp,
    norms,
    router,
)
from kvant.models.geometry.renaming import WITH_EXPERTS
from kvant.models.geometry.windows import (
    LayerType,
    every_layer,
    num_layers,
    read_layer_types,
    read_window,
    windows_of,
)

_MAX_WINDOW_LAYERS = 28  # Qwen2Config's and Qwen3Config's default
_QWEN3_HEAD_DIM = 128  # Qwen3Config's default


def _windows(fields: Fields) -> tuple[int | None, ...]:
    window = read_window(fields) if fields.flag("use_sliding_window") else None
    first = fields.optional_integer("max_window_layers", least=0, most=MAX_LAYERS)
    first = _MAX_WINDOW_LAYERS if first is None else first
    default = (
        LayerType.SLIDING if window is not None and index >= first else LayerType.FULL
        for index in range(num_layers(fields))
    )
    kinds = read_layer_types(fields, default)
    if window is None and LayerType.SLIDING in kinds:
        raise fields.bad("layer_types", "it has sliding layers, and use_sliding_window is off")
    return windows_of(fields, kinds, window)


def _qwen2_layers(fields: Fields, prefix: str) -> Layers:
    return attention_layers(prefix, read_heads(fields), _windows(fields))


def _qwen3_layers(fields: Fields, prefix: str) -> Layers:
    return attention_layers(prefix, read_heads(fields, head_dim=_QWEN3_HEAD_DIM), _windows(fields))


def _qwen3_moe_layers(fields: Fields, prefix: str) -> Layers:
    return attention_layers(prefix, read_heads(fields), every_layer(fields, switched=True))


def _qwen3_moe_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden = fields.integer("hidden_size")
    bias = fields.flag("attention_bias")
    count = fields.integer("num_experts", "num_local_experts", least=0)
    moe_size = fields.integer("moe_intermediate_size")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.HEAD)
        yield from norms(at, hidden, *NORMS)
        if is_sparse(fields, layer.index):
            yield router(f"{at}.mlp.gate", count, hidden)
            yield from experts(f"{at}.mlp", count, hidden, moe_size)
        else:
            yield from mlp(f"{at}.mlp", hidden, fields.integer("intermediate_size"))


def is_sparse(fields: Fields, index: int) -> bool:
    """Returns whether a layer has experts: every `decoder_sparse_step`-th, `mlp_only_layers` left out.

    A model with 0 experts is dense.
    """
    if fields.optional_integer("num_experts", "num_local_experts", least=0) == 0:
        return False
    dense = fields.integers("mlp_only_layers") or ()
    step = fields.optional_integer("decoder_sparse_step") or 1
    return index not in dense and (index + 1) % step == 0


QWEN2 = Family(
    "Qwen2", ("qwen2",), ("Qwen2ForCausalLM",), _qwen2_layers, dense_weights(qkv_bias=True)
)
QWEN3 = Family(
    "Qwen3", ("qwen3",), ("Qwen3ForCausalLM",), _qwen3_layers,
    dense_weights(reads_bias=True, qk_norm=QKNorm.HEAD),
)  # fmt: skip
QWEN3_MOE = Family(
    "Qwen3-MoE", ("qwen3_moe",), ("Qwen3MoeForCausalLM",), _qwen3_moe_layers, _qwen3_moe_weights,
    names=WITH_EXPERTS,
)  # fmt: skip
