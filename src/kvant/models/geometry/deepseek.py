"""DeepSeek-V2 and V3: multi-head latent attention (MLA).

A token's keys and values of all heads come from one latent of `kv_lora_rank` numbers and one rotary
key of `qk_rope_head_dim` numbers, shared by the heads (DeepSeek-V2, arXiv:2405.04434, section 2.1).
Only these are stored: one KV head, a "K" of both parts together, no V.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kvant.kv.geometry import Attention, LayerGeometry
from kvant.models.geometry.family import NORMS, Family, Layers
from kvant.models.geometry.fields import MAX_LAYERS, Fields, text_section
from kvant.models.geometry.parameters import (
    Weight,
    experts,
    linear,
    mlp,
    norms,
    router,
    vector,
)
from kvant.models.geometry.renaming import WITH_EXPERTS
from kvant.models.geometry.windows import num_layers


def _layers(fields: Fields, prefix: str) -> Layers:
    num_q = fields.integer("num_attention_heads")
    rank, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    return tuple(
        LayerGeometry(
            index=index,
            name=f"{prefix}.{index}.self_attn",
            attention=Attention.MLA,
            num_q_heads=num_q,
            num_kv_heads=1,
            head_dim_k=rank + rope,
            head_dim_v=rank,
        )
        for index in range(num_layers(fields))
    )


def expanded_latents(config: Mapping[str, Any], layers: Layers) -> str | None:
    """Returns what it costs that layers keep keys and values made from latents; None if none do.

    transformers' modules make them before they attend, and only Kvant's own decoder attends to latents.
    """
    text = text_section(config)
    rank, rope = text.get("kv_lora_rank"), text.get("qk_rope_head_dim")
    expanded = [layer for layer in layers if layer.attention is Attention.FULL]
    if not expanded or type(rank) is not int or type(rope) is not int:
        return None
    first = expanded[0]
    kept = first.num_kv_heads * (first.head_dim_k + first.head_dim_v)
    return (
        f"latent attention (MLA) in {len(expanded)} of {len(layers)} layers goes through transformers' "
        f"modules: each keeps keys and values of all heads, {kept:,} numbers per token, and not its latent "
        f"of {rank + rope:,}"
    )


def _attention(fields: Fields, layer: LayerGeometry, hidden: int) -> Iterator[Weight]:
    rank, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    nope, v_dim = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    q_rank, num_q = fields.optional_integer("q_lora_rank"), layer.num_q_heads
    bias, name = fields.flag("attention_bias"), layer.name
    if q_rank is None:
        yield from linear(f"{name}.q_proj", num_q * (nope + rope), hidden)
    else:
        yield from linear(f"{name}.q_a_proj", q_rank, hidden, bias=bias)
        yield vector(f"{name}.q_a_layernorm", q_rank)
        yield from linear(f"{name}.q_b_proj", num_q * (nope + rope), q_rank)
    yield from linear(f"{name}.kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
    yield vector(f"{name}.kv_a_layernorm", rank)
    yield from linear(f"{name}.kv_b_proj", num_q * (nope + v_dim), rank)
    yield from linear(f"{name}.o_proj", hidden, num_q * v_dim, bias=bias)


def _weights(fields: Fields, layers: Layers, *, v3: bool) -> Iterator[Weight]:
    """Yields the weights, without extra layers that predict further tokens (MTP), which are not loaded."""
    hidden, intermediate = fields.integer("hidden_size"), fields.integer("intermediate_size")
    size = fields.integer("moe_intermediate_size")
    count = fields.integer(*_EXPERTS)
    shared = fields.integer("n_shared_experts", least=0)
    first_sparse = fields.optional_integer("first_k_dense_replace", least=0, most=MAX_LAYERS) or 0
    bias = not v3 and fields.flag("mlp_bias")
    if fields.optional_integer("num_experts_per_tok") is None:
        raise fields.bad("num_experts_per_tok", "the class has no default that chooses experts")
    fields.optional_integer("num_key_value_heads")
    if v3:
        _check_v3(fields)
    elif fields.raw("topk_method") not in _METHODS:
        raise fields.bad("topk_method", f"transformers chooses experts by {' or '.join(_METHODS)}")
    for layer in layers:
        at = layer.name.removesuffix(".self_attn")
        yield from _attention(fields, layer, hidden)
        yield from norms(at, hidden, *NORMS)
        if layer.index < first_sparse:
            yield from mlp(f"{at}.mlp", hidden, intermediate, bias=bias)
            continue
        yield router(f"{at}.mlp.gate", count, hidden)
        if v3:
            yield vector(f"{at}.mlp.gate.e_score_correction_bias", count)
        yield from experts(f"{at}.mlp", count, hidden, size)
        yield from mlp(f"{at}.mlp.shared_experts", hidden, shared * size, bias=bias)


_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
"""Names of the number of experts in a layer."""

_METHODS = ("greedy", "group_limited_greedy")


def _check_v3(fields: Fields) -> None:
    """Raises BadCheckpoint for numbers that the class takes, but does not compute with."""
    for name in ("n_group", "topk_group"):
        fields.integer(name)
    rope = fields.integer("qk_rope_head_dim")
    if fields.has("head_dim") and fields.integer("head_dim") != rope:
        raise fields.bad("head_dim", f"{rope} numbers of a head rotate (qk_rope_head_dim)")


def _why_groups_have_no_score(fields: Fields) -> str | None:
    """Returns why no group of experts gets a score: it is the sum of its two best experts'."""
    groups = fields.optional_integer("n_group")
    count = fields.optional_integer(*_EXPERTS)
    dense = fields.optional_integer("first_k_dense_replace", least=0, most=MAX_LAYERS) or 0
    if groups is None or count is None or count >= 2 * groups or dense >= num_layers(fields):
        return None
    return f"n_group is {groups} for {count} experts, and two experts or more of a group make its score"


DEEPSEEK_V2 = Family(
    "DeepSeek-V2", ("deepseek_v2",), ("DeepseekV2ForCausalLM",), _layers, partial(_weights, v3=False),
    defaults={"n_shared_experts": 2}, names=WITH_EXPERTS,
)  # fmt: skip
DEEPSEEK_V3 = Family(
    "DeepSeek-V3", ("deepseek_v3",), ("DeepseekV3ForCausalLM",), _layers, partial(_weights, v3=True),
    defaults={"n_shared_experts": 1, "first_k_dense_replace": 3}, not_runnable=_why_groups_have_no_score,
    names=WITH_EXPERTS,
)  # fmt: skip
