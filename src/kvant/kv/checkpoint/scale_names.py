"""Names of scale tensors: map every exporter's spelling to one meaning.

    <module>.k_scale   .v_scale   .kv_scale       AutoFP8, compressed-tensors; kv: one for both
    <module>.k_global_scale   .v_global_scale     compressed-tensors' nvfp4
    <module>.k_proj.k_scale   .v_proj.v_scale     ModelOpt; also on fused projections (qkv_proj)
    <module>.k_proj.output_scale   .v_proj..      Quark, early compressed-tensors; also .q_proj
    <module>.q_scale   .prob_output_scale         for attention computed in 8 bits: not needed

<module> is the attention module ("model.layers.0.self_attn"); an `attn` that vLLM inserts behind it
is dropped. Everything in front of the last parts is left alone, so multimodal prefixes pass
through.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvant.kv.checkpoint.facts import Side


class ScaleRole(Enum):
    """What a tensor is for."""

    SCALE = "scale"
    GLOBAL_SCALE = "global scale"  # above block scales; compressed-tensors stores 1 / scale
    QUERY = "query scale"
    PROBABILITY = "probability scale"
    OFFSET = "offset"
    CHANNEL = "channel scale or offset"  # Ascend C8


WHY_IGNORED = {
    ScaleRole.QUERY: "not needed, queries are not quantised here",
    ScaleRole.PROBABILITY: "not needed, attention probabilities are not quantised here",
    ScaleRole.OFFSET: "not used, no format here takes offsets from a checkpoint",
    ScaleRole.CHANNEL: "not used, no format here has one scale per channel",
}


@dataclass(frozen=True, slots=True)
class ScaleName:
    """The meaning of a tensor's name. sides: both for `kv_scale`, none if it is about neither K nor V."""

    module: str
    role: ScaleRole
    sides: tuple[Side, ...]


_K = (Side.K,)
_V = (Side.V,)

_LEAVES: dict[str, tuple[ScaleRole, tuple[Side, ...]]] = {
    "k_scale": (ScaleRole.SCALE, _K),
    "v_scale": (ScaleRole.SCALE, _V),
    "kv_scale": (ScaleRole.SCALE, (Side.K, Side.V)),
    "k_global_scale": (ScaleRole.GLOBAL_SCALE, _K),
    "v_global_scale": (ScaleRole.GLOBAL_SCALE, _V),
    "q_scale": (ScaleRole.QUERY, ()),
    "q_global_scale": (ScaleRole.QUERY, ()),
    "prob_scale": (ScaleRole.PROBABILITY, ()),
    "prob_output_scale": (ScaleRole.PROBABILITY, ()),
    "k_zero_point": (ScaleRole.OFFSET, _K),
    "v_zero_point": (ScaleRole.OFFSET, _V),
    "k_bias": (ScaleRole.OFFSET, _K),
    "v_bias": (ScaleRole.OFFSET, _V),
    "k_cache_scale": (ScaleRole.CHANNEL, _K),
    "v_cache_scale": (ScaleRole.CHANNEL, _V),
    "k_cache_offset": (ScaleRole.CHANNEL, _K),
    "v_cache_offset": (ScaleRole.CHANNEL, _V),
}

_OUTPUTS = {
    "k_proj": (ScaleRole.SCALE, _K),
    "v_proj": (ScaleRole.SCALE, _V),
    "q_proj": (ScaleRole.QUERY, ()),
}

# Projections inside an attention module that carry scales, fused ones included.
_PROJECTIONS = frozenset(
    {"k_proj", "v_proj", "q_proj", "qkv_proj", "kv_proj", "kv_b_proj", "kv_a_proj_with_mqa",
     "qkv", "query_key_value", "Wqkv", "W_pack", "c_attn"}
)  # fmt: skip

_INSERTED = frozenset({"attn", "mla_attn"})

ATTENTION_MODULES = frozenset({"self_attn", "attention", "attn", "self_attention", "mixer"})
"""What architectures call their one causal attention module; the names mean the same."""


def read_scale_name(name: str) -> ScaleName | None:
    """What the tensor `name` is for KV quantisation, or None for any other tensor."""
    parts = name.split(".")
    leaf = parts.pop()
    if not parts:
        return None
    found = _OUTPUTS.get(parts[-1]) if leaf == "output_scale" else _LEAVES.get(leaf)
    if found is None:
        return None
    role, sides = found
    if parts[-1] in _PROJECTIONS and len(parts) > 1:
        parts.pop()
    while len(parts) > 1 and parts[-1] in _INSERTED and parts[-2] in ATTENTION_MODULES | _INSERTED:
        parts.pop()
    return ScaleName(".".join(parts), role, sides)
