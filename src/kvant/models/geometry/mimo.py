"""MiMo-V2: K and V of different sizes, windowed layers with more KV heads and with sinks.

`hybrid_layer_pattern` (1 for a windowed layer) or layer_types say which layers have a window.
Without either it is transformers' pattern for MiMo-V2-Flash: the first layer and every sixth are
full.

Window: `sliding_window_size` counts the tokens before the query's own, so one more is seen (as in
transformers 5.23's MiMoV2FlashConfig; 5.17 does not read it); `sliding_window` alone counts the
query's own too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvant.models.geometry.family import NORMS, Family, Layers, attention_layer
from kvant.models.geometry.fields import MAX_TOKENS, Fields
from kvant.models.geometry.heads import Heads, refuse_uneven
from kvant.models.geometry.parameters import (
    Weight,
    attention,
    experts,
    mlp,
    norms,
    router,
    vector,
)
from kvant.models.geometry.renaming import OF_ALL, OF_EXPERTS, NameRules, renaming
from kvant.models.geometry.windows import (
    LayerType,
    num_layers,
    read_layer_types,
    read_window,
    windows_of,
)


def _layers(fields: Fields, prefix: str) -> Layers:
    """MiMo-V2-Flash: what the config leaves out is as transformers' class has it."""
    kinds = _kinds(fields)
    windows = windows_of(fields, kinds, _window(fields))
    heads = {LayerType.FULL: _full_heads(fields), LayerType.SLIDING: _windowed_heads(fields)}
    sinks = {
        LayerType.FULL: fields.flag("add_full_attention_sink_bias"),
        LayerType.SLIDING: fields.flag("add_swa_attention_sink_bias", True),
    }
    return tuple(
        attention_layer(index, prefix, heads[kind], window, sinks=sinks[kind])
        for index, (kind, window) in enumerate(zip(kinds, windows, strict=True))
    )


def _v2_5_layers(fields: Fields, prefix: str) -> Layers:
    """Later models have no class that could fill in what is missing."""
    if not fields.has("hybrid_layer_pattern") and not fields.has("layer_types"):
        raise fields.bad("hybrid_layer_pattern", "a model cannot be planned without it")
    fields.integer("swa_num_key_value_heads")
    return _layers(fields, prefix)


def _kinds(fields: Fields) -> Sequence[LayerType]:
    count = num_layers(fields)
    pattern = fields.integers("hybrid_layer_pattern", most=1)
    if pattern is not None and not fields.has("layer_types"):
        if len(pattern) != count:
            raise fields.bad(
                "hybrid_layer_pattern", f"it has {len(pattern)} entries for {count} layers"
            )
        return [LayerType.SLIDING if windowed else LayerType.FULL for windowed in pattern]
    default = (
        LayerType.FULL if index == 0 or (index + 1) % 6 == 0 else LayerType.SLIDING
        for index in range(count)
    )
    return read_layer_types(fields, default)


def _window(fields: Fields) -> int | None:
    before = fields.optional_integer("sliding_window_size", most=MAX_TOKENS)
    return read_window(fields) if before is None else before + 1


def _full_heads(fields: Fields) -> Heads:
    num_q, num_kv = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    refuse_uneven(fields, "num_key_value_heads", num_q, num_kv)
    return Heads(num_q, num_kv, fields.integer("head_dim"), fields.integer("v_head_dim"))


def _windowed_heads(fields: Fields) -> Heads:
    """Returns the windowed layers' own numbers, where the config has any; twice the KV heads without."""
    full = _full_heads(fields)
    num_q = fields.optional_integer("swa_num_attention_heads") or full.num_q
    num_kv = fields.optional_integer("swa_num_key_value_heads") or 2 * full.num_kv
    refuse_uneven(fields, "swa_num_key_value_heads", num_q, num_kv)
    return Heads(
        num_q,
        num_kv,
        fields.optional_integer("swa_head_dim") or full.head_dim_k,
        fields.optional_integer("swa_v_head_dim") or full.head_dim_v,
    )


def _weights(fields: Fields, layers: Layers) -> Iterator[Weight]:
    hidden, bias = fields.integer("hidden_size"), fields.flag("attention_bias")
    count = fields.integer("n_routed_experts", "num_local_experts")
    size = fields.integer("moe_intermediate_size")
    sparse = _sparse(fields)
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from attention(layer, hidden, qkv_bias=bias)
        yield from norms(at, hidden, *NORMS)
        if sparse[layer.index]:
            yield router(f"{at}.mlp.gate", count, hidden)
            yield vector(f"{at}.mlp.gate.e_score_correction_bias", count)
            yield from experts(f"{at}.mlp", count, hidden, size)
        else:
            yield from mlp(f"{at}.mlp", hidden, fields.integer("intermediate_size"))


def _sparse(fields: Fields) -> Sequence[bool]:
    """Which layers have experts: `mlp_layer_types`, `moe_layer_freq`, else all but the first."""
    count = num_layers(fields)
    words = fields.words("mlp_layer_types")
    if words is not None:
        name, found = "mlp_layer_types", [word == "sparse" for word in words]
    else:
        flags = fields.integers("moe_layer_freq", most=1)
        name, found = "moe_layer_freq", [index > 0 for index in range(count)]
        if flags is not None:
            found = [flag == 1 for flag in flags]
    if len(found) != count:
        raise fields.bad(name, f"it has {len(found)} entries for {count} layers")
    return found


def _other_towers(fields: Fields) -> Iterable[Weight] | str:
    for name in ("vision_config", "audio_config"):
        if fields.has(name):
            return f"Kvant does not know the weights of MiMo's {name.removesuffix('_config')} tower"
    return ()


_NAMES = NameRules(
    (*OF_EXPERTS, renaming(r"self_attn\.attention_sink_bias", to="self_attn.sinks"), *OF_ALL)
)

MIMO_V2_FLASH = Family(
    "MiMo-V2-Flash", ("mimo_v2_flash",), ("MiMoV2FlashForCausalLM",), _layers, _weights,
    defaults={"sliding_window": 129}, rotary_by_kind=True,
    not_runnable="releases of transformers disagree about the window of its layers",
    names=_NAMES,
)  # fmt: skip
MIMO_V2 = Family(
    "MiMo-V2.5", ("mimo_v2",), ("MiMoV2ForCausalLM",), _v2_5_layers, _weights,
    not_runnable="transformers has no class for MiMo-V2.5", towers=_other_towers,
    rotary_by_kind=True, names=None,
)  # fmt: skip
