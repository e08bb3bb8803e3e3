"""What Kvant knows about a family of models: its names, its layers and its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kvant.kv.geometry import Attention, LayerGeometry
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.heads import Heads
from kvant.models.geometry.parameters import QKNorm, Weight, attention, mlp, norms
from kvant.models.geometry.renaming import AS_MODULES, NameRules

Layers = tuple[LayerGeometry, ...]
Weights = Callable[[Fields, Layers], Iterable[Weight]]

NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Family:
    """Models that share a transformers class, as a config names them.

    model_types, architectures: the names a config may carry. layers, weights: read a decoder's
    fields, in layer order. prefix: path of the decoder layers in the class that transformers'
    AutoModelForCausalLM makes of the model_type. in_text_config: the decoder's fields are nested
    (multimodal models). defaults: fields that published configs leave to transformers' class.
    tied: the class's default for tie_word_embeddings. not_runnable: why Kvant plans but does not
    run these models, or reads it from the decoder's fields. single_layers_differ: the family reads
    `per_layer_config`. rotary_by_kind: full and sliding layers may have rotary numbers of their
    own. towers: weights beside the decoder, given the top of the config, or why they cannot be
    counted. names: the class's rules for names in files; None if they are unknown.
    """

    title: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    layers: Callable[[Fields, str], Layers]
    weights: Weights
    prefix: str = "model.layers"
    in_text_config: bool = False
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    tied: bool = False
    not_runnable: str | Callable[[Fields], str | None] | None = None
    single_layers_differ: bool = False
    rotary_by_kind: bool = False
    towers: Callable[[Fields], Iterable[Weight] | str] | None = None
    names: NameRules | None = AS_MODULES


def attention_layers(
    prefix: str,
    heads: Heads,
    windows: Sequence[int | None],
    *,
    sinks: bool = False,
    softcap: float = 0.0,
) -> Layers:
    """Builds layers that differ only in their windows."""
    return tuple(
        attention_layer(index, prefix, heads, window, sinks=sinks, softcap=softcap)
        for index, window in enumerate(windows)
    )


def attention_layer(
    index: int,
    prefix: str,
    heads: Heads,
    window: int | None,
    *,
    sinks: bool = False,
    softcap: float = 0.0,
    shared_with: int | None = None,
    causal: bool = True,
) -> LayerGeometry:
    """Returns one layer with K and V. A layer that shares another's KV keeps the head sizes it reads."""
    kind = Attention.FULL if window is None else Attention.SLIDING
    return LayerGeometry(
        index=index,
        name=f"{prefix}.{index}.self_attn",
        attention=kind if shared_with is None else Attention.SHARED,
        num_q_heads=heads.num_q,
        num_kv_heads=heads.num_kv,
        head_dim_k=heads.head_dim_k,
        head_dim_v=heads.head_dim_v,
        window=window,
        shared_with=shared_with,
        sinks=sinks,
        softcap=softcap,
        causal=causal,
    )


def dense_weights(
    *,
    qkv_bias: bool = False,
    reads_bias: bool = False,
    reads_mlp_bias: bool = False,
    qk_norm: QKNorm = QKNorm.NONE,
    norm_names: Sequence[str] = NORMS,
) -> Weights:
    """Weights of layers that each have attention, one feed-forward network and norms.

    qkv_bias: q, k and v have biases, regardless of the config. reads_bias, reads_mlp_bias: the class
    heeds `attention_bias` and `mlp_bias`.
    """

    def weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
        hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
        bias = reads_bias and fields.flag("attention_bias")
        mlp_bias = reads_mlp_bias and fields.flag("mlp_bias")
        for layer in layers:
            at = layer.name.removesuffix(".self_attn")
            yield from attention(
                layer, hidden, qkv_bias=qkv_bias or bias, o_bias=bias, qk_norm=qk_norm
            )
            yield from mlp(f"{at}.mlp", hidden, intermediate, bias=mlp_bias)
            yield from norms(at, hidden, *norm_names)

    return weights
