"""Gemma 3n: Gemma 3's attention, four windowed layers to one full, KV shared by the last layers.

Its decoder keeps several copies of the hidden state (AltUp) and mixes them with small matrices,
adds a low-rank path (LAuReL) and an embedding per layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvant.models.geometry.family import FOUR_NORMS, Family, Layers, attention_layer
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.gemma2 import refuse_encoder
from kvant.models.geometry.heads import read_heads
from kvant.models.geometry.parameters import (
    QKNorm,
    Weight,
    attention,
    embedding,
    linear,
    mlp,
    norms,
    vector,
)
from kvant.models.geometry.renaming import OF_ALL, OF_TEXT, NameRules
from kvant.models.geometry.towers import gemma3n_towers
from kvant.models.geometry.windows import full_every, kv_sources, read_window, windows_of

# What Gemma3nTextConfig takes for fields that a config leaves out.
_DEFAULTS = {
    "head_dim": 256,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "max_position_embeddings": 32768,
}


def _layers(fields: Fields, prefix: str) -> Layers:
    refuse_encoder(fields)
    heads = read_heads(fields)
    kinds = full_every(fields, 5)
    _refuse_sparsity(fields, len(kinds))
    windows = windows_of(fields, kinds, read_window(fields))
    return tuple(
        attention_layer(index, prefix, heads, window, shared_with=source)
        for index, (window, source) in enumerate(
            zip(windows, kv_sources(fields, kinds), strict=True)
        )
    )


def _refuse_sparsity(fields: Fields, count: int) -> None:
    """Raises BadCheckpoint unless the shares of inputs that layers drop are one for each layer, or null."""
    name = "activation_sparsity_pattern"
    found = fields.given(name)
    if found is None:
        return
    is_list = isinstance(found, list) and all(type(one) in (int, float) for one in found)
    if not is_list or len(found) != count or not all(0 <= one < 1 for one in found):
        raise fields.bad(name, f"it must be a list of {count} shares, each from 0 to less than 1")


def _weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, bias = fields.integer("hidden_size"), fields.flag("attention_bias")
    sizes = _intermediate_sizes(fields, len(layers))
    copies, rank = fields.integer("altup_num_inputs", most=64), fields.integer("laurel_rank")
    per_layer = fields.integer("hidden_size_per_layer_input")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden, qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.HEAD)
        yield from mlp(f"{at}.mlp", hidden, sizes[layer.index])
        yield from norms(at, hidden, *FOUR_NORMS)
        yield from linear(f"{at}.altup.correction_coefs", copies, copies)
        yield from linear(f"{at}.altup.prediction_coefs", copies * copies, copies)
        yield from linear(f"{at}.altup.modality_router", copies, hidden)
        yield from norms(at, hidden, "altup.correct_output_scale", "altup.router_norm")
        yield from linear(f"{at}.laurel.linear_left", rank, hidden)
        yield from linear(f"{at}.laurel.linear_right", hidden, rank)
        yield from norms(at, hidden, "laurel.post_laurel_norm")
        yield from linear(f"{at}.per_layer_input_gate", per_layer, hidden)
        yield from linear(f"{at}.per_layer_projection", hidden, per_layer)
        yield from norms(at, hidden, "post_per_layer_input_norm")
    at = layers[0].name.rpartition(".layers.")[0]
    yield from per_layer_embedding(fields, at, len(layers), hidden, per_layer)
    for index in range(copies - 1):
        yield from linear(f"{at}.altup_projections.{index}", hidden, hidden)
        yield from linear(f"{at}.altup_unembed_projections.{index}", hidden, hidden)


def per_layer_embedding(
    fields: Fields, at: str, count: int, hidden: int, per_layer: int
) -> Iterator[Weight]:
    """Yields a second embedding, `per_layer` numbers for each of `count` layers, and its mixing."""
    rows = fields.integer("vocab_size_per_layer_input")
    yield embedding(f"{at}.embed_tokens_per_layer", rows, count * per_layer)
    yield from linear(f"{at}.per_layer_model_projection", count * per_layer, hidden)
    yield vector(f"{at}.per_layer_projection_norm", per_layer)


def _intermediate_sizes(fields: Fields, count: int) -> Sequence[int]:
    """Returns one number for all layers, or a list of one per layer."""
    if not isinstance(fields.raw("intermediate_size"), list | tuple):
        return (fields.integer("intermediate_size"),) * count
    sizes = fields.integers("intermediate_size", least=1) or ()
    if len(sizes) != count:
        raise fields.bad("intermediate_size", f"it has {len(sizes)} entries for {count} layers")
    return sizes


GEMMA3N_TEXT = Family(
    "Gemma 3n text", ("gemma3n_text",), ("Gemma3nForCausalLM",), _layers, _weights,
    defaults=_DEFAULTS, tied=True, rotary_by_kind=True, names=NameRules((*OF_TEXT, *OF_ALL)),
)  # fmt: skip
GEMMA3N = Family(
    "Gemma 3n", ("gemma3n",), ("Gemma3nForConditionalGeneration",), _layers, _weights,
    prefix="model.language_model.layers", in_text_config=True, defaults=_DEFAULTS, tied=True,
    rotary_by_kind=True, towers=gemma3n_towers,
    not_runnable="its vision tower needs the package timm, with which Kvant has not run it",
    names=None,
)  # fmt: skip
