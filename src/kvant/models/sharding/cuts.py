"""Which part of each weight a rank holds. No torch.

The table names weights as checkpoints and transformers' modules do. A rule decides the dimension that is
divided; whole heads stay together. A weight without a rule is replicated.

    columns of outputs   q, k, v, gate, up, the head: each rank computes its own outputs
    rows of inputs       o, down: each rank computes a partial sum of all outputs, and the sums are added
    once                 a bias of such a sum: rank 0 adds it

A latent of all heads (MLA) is computed and stored by every rank; what expands it is divided by heads. A
recurrence is divided by its heads, and so are its states and the channels of its convolution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvant.kv.geometry import ModelGeometry
from kvant.models.sharding.shard import Shard, recurrence_of

Ranges = tuple[tuple[int, int], ...]


class Rule(Enum):
    """How one kind of weight is divided. Dimensions are counted from the end."""

    Q_OUTPUTS = "query heads of the first dimension"
    KV_OUTPUTS = "KV heads of the first dimension"
    QKV_OUTPUTS = "query and KV heads of the first dimension, one behind the other"
    Q_INPUTS = "query heads of the last dimension, to be summed"
    OUTPUTS = "the first dimension"
    PAIRED_OUTPUTS = "both halves of the first dimension"
    INPUTS = "the last dimension, to be summed"
    EXPERT_PAIRED_OUTPUTS = "both halves of each expert's first dimension"
    EXPERT_INPUTS = "each expert's last dimension, to be summed"
    EXPERT_ROWS = "each expert's first dimension, to be summed"
    EXPERT_COLUMNS = "each expert's last dimension"
    EXPERT_ONCE = "added once, for each expert"
    ONCE = "added once"
    CHANNELS = "heads of q, k and v of a recurrence, one behind the other in the first dimension"
    MIXER_INPUTS = "the last dimension, to be summed behind the layer's mixer"
    HEADS_OF_A_NORM = "query heads of a norm over all heads"
    KV_HEADS_OF_A_NORM = "KV heads of a norm over all heads"
    VOCABULARY = "rows of the vocabulary"


SUMMED = frozenset((Rule.Q_INPUTS, Rule.INPUTS))
"""Matrices whose products are partial sums."""

_LAST = frozenset(
    (Rule.Q_INPUTS, Rule.INPUTS, Rule.MIXER_INPUTS, Rule.EXPERT_INPUTS, Rule.EXPERT_COLUMNS)
)

_ATTENTION = {
    r"self_attn\.q_proj\.(weight|bias)": Rule.Q_OUTPUTS,
    r"self_attn\.[kv]_proj\.(weight|bias)": Rule.KV_OUTPUTS,
    r"self_attn\.o_proj\.weight": Rule.Q_INPUTS,
    r"self_attn\.o_proj\.bias": Rule.ONCE,
}
_MLP = {
    r"mlp\.(gate|up)_proj\.(weight|bias)": Rule.OUTPUTS,
    r"mlp\.down_proj\.weight": Rule.INPUTS,
    r"mlp\.down_proj\.bias": Rule.ONCE,
}
_EXPERTS = {
    r"mlp\.experts\.gate_up_proj": Rule.EXPERT_PAIRED_OUTPUTS,
    r"mlp\.experts\.down_proj": Rule.EXPERT_INPUTS,
    r"(mlp|block_sparse_moe)\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight": Rule.OUTPUTS,
    r"(mlp|block_sparse_moe)\.experts\.\d+\.(down_proj|w2)\.weight": Rule.INPUTS,
}
_DENSE = {**_ATTENTION, **_MLP}
_SHARED_EXPERT = {
    r"mlp\.shared_experts?\.(gate|up)_proj\.weight": Rule.OUTPUTS,
    r"mlp\.shared_experts?\.down_proj\.weight": Rule.INPUTS,
}
_LATENT = {
    r"self_attn\.(q_proj|q_b_proj|kv_b_proj)\.weight": Rule.Q_OUTPUTS,
    r"self_attn\.o_proj\.weight": Rule.Q_INPUTS,
    r"self_attn\.o_proj\.bias": Rule.ONCE,
    **_MLP, **_EXPERTS, **_SHARED_EXPERT,
}  # fmt: skip
_DELTA = {
    r"linear_attn\.(in_proj_qkv|conv1d)\.weight": Rule.CHANNELS,
    # Qwen3-Next joins them by heads of keys.
    r"linear_attn\.in_proj_(z|b|a|qkvz|ba)\.weight": Rule.OUTPUTS,
    r"linear_attn\.(dt_bias|A_log)(\.weight)?": Rule.OUTPUTS,
    r"linear_attn\.out_proj\.weight": Rule.MIXER_INPUTS,
    **_DENSE, **_EXPERTS, **_SHARED_EXPERT,
}  # fmt: skip

RULES: Mapping[str, Mapping[str, Rule]] = {
    "llama": _DENSE,
    "mistral": _DENSE,
    "ministral": _DENSE,
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "gemma2": _DENSE,
    "gemma3_text": _DENSE,
    "phi3": {
        r"self_attn\.qkv_proj\.weight": Rule.QKV_OUTPUTS,
        r"self_attn\.o_proj\.weight": Rule.Q_INPUTS,
        r"mlp\.gate_up_proj\.weight": Rule.PAIRED_OUTPUTS,
        r"mlp\.down_proj\.weight": Rule.INPUTS,
        **_DENSE,  # the names of `kvant.models.geometry`, which counts q, k and v apart
    },
    "olmo2": {
        **_DENSE,
        r"self_attn\.q_norm\.weight": Rule.HEADS_OF_A_NORM,
        r"self_attn\.k_norm\.weight": Rule.KV_HEADS_OF_A_NORM,
    },
    "mixtral": {**_ATTENTION, **_EXPERTS},
    "qwen3_moe": {**_DENSE, **_EXPERTS},
    "gpt_oss": {
        **_ATTENTION,
        r"self_attn\.sinks": Rule.Q_OUTPUTS,
        r"mlp\.experts\.gate_up_proj(_bias)?": Rule.EXPERT_COLUMNS,  # gate and up alternate
        r"mlp\.experts\.down_proj": Rule.EXPERT_ROWS,
        r"mlp\.experts\.down_proj_bias": Rule.EXPERT_ONCE,
        r"mlp\.experts\.\d+\.(gate_proj|up_proj)\.weight": Rule.OUTPUTS,
        r"mlp\.experts\.\d+\.down_proj\.weight": Rule.INPUTS,
    },
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA
    ),
}
"""By model_type: patterns of the names behind `layers.N.`, and the rule of each."""

_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_TOWER = re.compile(r"vision|visual|audio|(?:^|\.)mtp\.")
_HEAD = re.compile(r"(?:^|\.)lm_head\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranges of dimension `dim`, counted from the end, which has `width` numbers in the whole tensor."""

    rule: Rule
    dim: int
    ranges: Ranges
    width: int

    @property
    def length(self) -> int:
        return sum(end - start for start, end in self.ranges)

    @property
    def share(self) -> float:
        """The part of the tensor that is held."""
        return self.length / self.width


class Cuts:
    """The cuts of one model for one rank. geometry: of the whole model."""

    def __init__(self, geometry: ModelGeometry, shard: Shard) -> None:
        self.shard = shard
        self._geometry = geometry
        rules = RULES.get(geometry.model_type, {})
        self._rules = [(re.compile(pattern), rule) for pattern, rule in rules.items()]

    def rule_of(self, name: str) -> Rule | None:
        """The rule of a weight by its name; None for one that is replicated."""
        if _HEAD.search(name):
            return Rule.VOCABULARY
        found = _IN_LAYER.search(name)
        if found is None or _TOWER.search(name):
            return None
        inner = found[2]
        return next((rule for pattern, rule in self._rules if pattern.fullmatch(inner)), None)

    def of(self, name: str, shape: Sequence[int]) -> Cut | None:
        """What this rank holds of a whole tensor [*shape]; None for all of it."""
        rule = self.rule_of(name)
        if rule in (None, Rule.ONCE, Rule.EXPERT_ONCE):
            return None
        assert rule is not None
        dim = -len(shape)
        if rule in _LAST:
            dim = -1
        elif rule in (Rule.EXPERT_PAIRED_OUTPUTS, Rule.EXPERT_ROWS):
            dim = -2
        width = shape[dim]
        return Cut(rule, dim, self._ranges(rule, name, width), width)

    def kv_repeats(self, name: str) -> int:
        """How many ranks hold each KV head of the layer of this weight."""
        return max(1, self.shard.size // self._geometry.layers[_layer_of(name)].num_kv_heads)

    def _ranges(self, rule: Rule, name: str, width: int) -> Ranges:
        shard = self.shard
        if rule is Rule.VOCABULARY:
            most = -(-width // shard.size)
            return ((min(width, shard.rank * most), min(width, (shard.rank + 1) * most)),)
        if rule in (Rule.PAIRED_OUTPUTS, Rule.EXPERT_PAIRED_OUTPUTS):
            half = width // 2
            ((start, end),) = self._even(half)
            return (start, end), (half + start, half + end)
        if rule is Rule.QKV_OUTPUTS:
            layer = self._geometry.layers[_layer_of(name)]
            q, kv = layer.num_q_heads, layer.num_kv_heads
            each = width // (q + 2 * kv)
            first, last = shard.kv_heads(kv)
            (of_q,) = self._even(q)
            heads = of_q, (q + first, q + last), (q + kv + first, q + kv + last)
            return tuple((a * each, b * each) for a, b in heads)
        if rule is Rule.CHANNELS:
            heads_of = recurrence_of(self._geometry.layers[_layer_of(name)])
            assert heads_of is not None
            starts, found = 0, []
            for width in (heads_of.key_width, heads_of.key_width, heads_of.value_width):
                ((start, end),) = self._even(width)
                found.append((starts + start, starts + end))
                starts += width
            return tuple(found)
        if rule in (Rule.KV_OUTPUTS, Rule.KV_HEADS_OF_A_NORM):
            kv = self._geometry.layers[_layer_of(name)].num_kv_heads
            first, last = shard.kv_heads(kv)
            return ((first * (width // kv), last * (width // kv)),)
        if rule in (Rule.Q_OUTPUTS, Rule.Q_INPUTS, Rule.HEADS_OF_A_NORM):
            q = self._geometry.layers[_layer_of(name)].num_q_heads
            ((first, last),) = self._even(q)
            return ((first * (width // q), last * (width // q)),)
        return self._even(width)

    def _even(self, width: int) -> Ranges:
        assert width % self.shard.size == 0, "the plan refuses what cannot be divided"
        each = width // self.shard.size
        return ((self.shard.rank * each, (self.shard.rank + 1) * each),)


def _layer_of(name: str) -> int:
    found = _IN_LAYER.search(name)
    assert found is not None
    return int(found[1])
