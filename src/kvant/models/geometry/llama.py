"""Llama and models of the same shape: Mistral, Ministral, Mixtral, Phi-3, OLMo 2.

Windows: Llama and OLMo 2 have none; Mistral and Phi-3 have one on every layer where `sliding_window` is
a number. A Mistral with `layer_types` is a Ministral to transformers, with any model_type: it has
the window on its sliding layers only. Phi-3's and Mixtral's classes do not read `layer_types`.

Mixtral has Mistral's attention and experts instead of one feed-forward network.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvant.models.geometry.family import NORMS, Family, Layers, attention_layers, dense_weights
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import (
    QKNorm,
    Weight,
    attention,
    experts,
    linear,
    norms,
    router,
)
from kvant.models.geometry.renaming import OF_ALL, NameRules, renaming
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


def _one_window(fields: Fields, prefix: str) -> Layers:
    heads = read_heads(fields, kv_defaults_to_q=True)
    return attention_layers(prefix, heads, every_layer(fields))


def _mistral(fields: Fields, prefix: str) -> Layers:
    heads, window = read_heads(fields, kv_defaults_to_q=True), read_window(fields)
    kind = LayerType.FULL if window is None else LayerType.SLIDING
    kinds = read_layer_types(fields, (kind,) * num_layers(fields))
    return attention_layers(prefix, heads, windows_of(fields, kinds, window))


def _mixtral_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    count = fields.integer("num_local_experts", "num_experts")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden)
        yield router(f"{at}.block_sparse_moe.gate", count, hidden)
        yield from experts(
            f"{at}.block_sparse_moe", count, hidden, intermediate, ("w1", "w3", "w2")
        )
        yield from norms(at, hidden, *NORMS)


def _phi3_weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    """Queries, keys and values are one projection, and so are gate and up."""
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    for layer in layers:
        at, size = layer.name.removesuffix(".self_attn"), layer.head_dim_k
        heads = layer.num_q_heads + 2 * layer.num_kv_heads
        yield from linear(f"{layer.name}.qkv_proj", heads * size, hidden)
        yield from linear(f"{layer.name}.o_proj", hidden, layer.num_q_heads * size)
        yield from linear(f"{at}.mlp.gate_up_proj", 2 * intermediate, hidden)
        yield from linear(f"{at}.mlp.down_proj", hidden, intermediate)
        yield from norms(at, hidden, *NORMS)


LLAMA = Family(
    "Llama", ("llama",), ("LlamaForCausalLM",),
    _full, dense_weights(reads_bias=True, reads_mlp_bias=True),
)  # fmt: skip
MISTRAL = Family(
    "Mistral", ("mistral", "ministral"), ("MistralForCausalLM", "MinistralForCausalLM"),
    _mistral, dense_weights(),
)  # fmt: skip
_MIXTRAL_NAMES = NameRules((
    renaming(r"\.block_sparse_moe", to=".mlp"),
    renaming(
        r"\.experts\..*\.w1\.weight", r"\.experts\..*\.w3\.weight",
        to=".experts.gate_up_proj", joins=True,
    ),
    renaming(r"\.experts\..*\.w2\.weight", to=".experts.down_proj", joins=True),
    *OF_ALL,
))  # fmt: skip

MIXTRAL = Family(
    "Mixtral", ("mixtral",), ("MixtralForCausalLM",), _one_window, _mixtral_weights, names=_MIXTRAL_NAMES,
)  # fmt: skip
PHI3 = Family("Phi-3", ("phi3",), ("Phi3ForCausalLM",), _one_window, _phi3_weights)
OLMO2 = Family(
    "OLMo 2", ("olmo2",), ("Olmo2ForCausalLM",), _full,
    dense_weights(
        reads_bias=True, qk_norm=QKNorm.ROW,
        norm_names=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
)  # fmt: skip
