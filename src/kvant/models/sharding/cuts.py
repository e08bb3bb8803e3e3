"""Determines which part of each weight a rank has. No torch.

The table has the names of weights in checkpoints and transformers' modules. A rule gives the dimension that
is divided; heads are not split. A weight without a rule is replicated.

    columns of outputs   q, k, v, gate, up, the head: each rank computes its own outputs
    rows of inputs       o, down: each rank computes a partial sum of all outputs, and the sums are added
    once                 a bias of such a sum: rank 0 adds it

Every rank computes and stores the latent of all heads (MLA). Matrices that expand it are divided by heads.
A recurrence is divided by its heads, and so are its states and the channels of its convolution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvant.kv.geometry import LayerGeometry, ModelGeometry
from kvant.models.sharding.shard import Recurrence, Shard, recurrence_of

Ranges = tuple[tuple[int, int], ...]
Items = tuple[int, ...]


class Rule(Enum):
    """How one kind of weight is divided. Dimensions are counted from the end."""

    OUTPUTS = "the first dimension"
    KV_OUTPUTS = "KV heads of the first dimension"
    QKV_OUTPUTS = "query and KV heads of the first dimension, one behind the other"
    PAIRED_OUTPUTS = "both halves of the first dimension"
    THIRDS = "each third of the first dimension"
    INPUTS = "the last dimension, to be summed"
    MIXER_INPUTS = "the last dimension, to be summed behind the layer's mixer"
    ONCE = "added once"
    EXPERT_OUTPUTS = "each expert's first dimension"
    EXPERT_PAIRED_OUTPUTS = "both halves of each expert's first dimension"
    EXPERT_INPUTS = "each expert's last dimension, to be summed"
    EXPERT_ROWS = "each expert's first dimension, to be summed"
    EXPERT_COLUMNS = "each expert's last dimension"
    EXPERT_ONCE = "added once, for each expert"
    ONE_PER_HEAD = "the one dimension that has a number for each head"
    CHANNELS = "heads of q, k and v of a recurrence, one behind the other in the first dimension"
    KEY_HEADS = "heads of keys of a recurrence, in the first dimension"
    BY_KEY_HEAD = "heads of keys, each with its q, k, v and gate, in the first dimension"
    STRENGTHS = "heads of keys, each with two numbers for every head that it serves"
    MAMBA_ENTRY = "gate, values, groups of B and of C, and steps, in the first dimension"
    MAMBA_CHANNELS = "values, groups of B and of C, in the first dimension"
    GATED_NORM = "a norm over values of a recurrence's heads"
    HEADS_OF_A_NORM = "query heads of a norm over all heads"
    KV_HEADS_OF_A_NORM = "KV heads of a norm over all heads"
    VOCABULARY = "rows of the vocabulary"


SUMMED = frozenset((Rule.INPUTS,))
"""Matrices whose products are partial sums."""

_LAST = frozenset((Rule.INPUTS, Rule.MIXER_INPUTS, Rule.EXPERT_INPUTS, Rule.EXPERT_COLUMNS))
_BEFORE_LAST = frozenset((Rule.EXPERT_OUTPUTS, Rule.EXPERT_PAIRED_OUTPUTS, Rule.EXPERT_ROWS))

_OF_RECURRENCES = frozenset(
    (
        Rule.CHANNELS, Rule.KEY_HEADS, Rule.BY_KEY_HEAD, Rule.STRENGTHS, Rule.MAMBA_ENTRY,
        Rule.MAMBA_CHANNELS,
    )
)  # fmt: skip

_COMMON = {
    # Attention. Heads divide among ranks, so equal parts are whole heads.
    r"(self_attn|mixer)\.q_proj\.(weight|bias)": Rule.OUTPUTS,
    r"(self_attn|mixer)\.[kv]_proj\.(weight|bias)": Rule.KV_OUTPUTS,
    r"self_attn\.qkv_proj\.(weight|bias)": Rule.QKV_OUTPUTS,
    r"(self_attn|attention)\.query_key_value\.(weight|bias)": Rule.OUTPUTS,  # head by head
    r"self_attn\.sinks": Rule.OUTPUTS,
    r"(self_attn|attention|mixer)\.(o_proj|out_proj|dense)\.weight": Rule.INPUTS,
    r"(self_attn|attention|mixer)\.(o_proj|out_proj|dense)\.bias": Rule.ONCE,
    r"block_sparse_moe\.input_linear\.weight": Rule.EXPERT_PAIRED_OUTPUTS,
    r"block_sparse_moe\.output_linear\.weight": Rule.EXPERT_INPUTS,
    # Feed-forward networks: dense, shared by all tokens, and experts.
    r"([a-z_.]+\.)?(gate_proj|up_proj|w1|w3|fc1|c_fc|dense_h_to_4h)\.(weight|bias)": Rule.OUTPUTS,
    r"([a-z_.]+\.)?(gate_up_proj|input_linear)\.(weight|bias)": Rule.PAIRED_OUTPUTS,
    r"([a-z_.]+\.)?(down_proj|w2|fc2|c_proj|dense_4h_to_h|output_linear)\.weight": Rule.INPUTS,
    r"([a-z_.]+\.)?(down_proj|w2|fc2|c_proj|dense_4h_to_h|output_linear)\.bias": Rule.ONCE,
    r"[a-z_]+\.experts\.gate_up_proj": Rule.EXPERT_PAIRED_OUTPUTS,
    r"[a-z_]+\.experts\.down_proj": Rule.EXPERT_INPUTS,
    r"[a-z_]+\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight": Rule.OUTPUTS,
    r"[a-z_]+\.experts\.\d+\.(down_proj|w2)\.weight": Rule.INPUTS,
}
_LATENT = {
    r"self_attn\.(q_b_proj|kv_b_proj)\.weight": Rule.OUTPUTS,
}
_ALL_HEADS = {
    r"self_attn\.q_norm\.weight": Rule.HEADS_OF_A_NORM,
    r"self_attn\.k_norm\.weight": Rule.KV_HEADS_OF_A_NORM,
}
_DELTA = {
    r"linear_attn\.(in_proj_qkv|conv1d)\.weight": Rule.CHANNELS,
    r"linear_attn\.in_proj_(z|b|a)\.weight": Rule.OUTPUTS,
    r"linear_attn\.in_proj_qkvz\.weight": Rule.BY_KEY_HEAD,
    r"linear_attn\.in_proj_ba\.weight": Rule.STRENGTHS,
    r"linear_attn\.(dt_bias|A_log)(\.weight)?": Rule.OUTPUTS,
    r"linear_attn\.out_proj\.weight": Rule.MIXER_INPUTS,
}
_MAMBA2 = {
    r"(mamba|mixer)\.in_proj\.(weight|bias)": Rule.MAMBA_ENTRY,
    r"(mamba|mixer)\.conv1d\.(weight|bias)": Rule.MAMBA_CHANNELS,
    r"(mamba|mixer)\.(A_log|D|dt_bias)": Rule.OUTPUTS,
    r"(mamba|mixer)\.norm\.weight": Rule.GATED_NORM,
    r"(mamba|mixer)\.out_proj\.weight": Rule.MIXER_INPUTS,
    r"(mamba|mixer)\.out_proj\.bias": Rule.ONCE,
}
_SHORT_CONV = {
    r"conv\.in_proj\.(weight|bias)": Rule.THIRDS,
    r"conv\.conv\.(weight|bias)": Rule.OUTPUTS,
    r"conv\.out_proj\.weight": Rule.MIXER_INPUTS,
    r"conv\.out_proj\.bias": Rule.ONCE,
}

_PLAIN = """
    llama mistral ministral ministral3 qwen2 qwen3 qwen2_vl qwen2_5_vl qwen3_vl internlm3 iquestcoder
    seed_oss cwm smollm3 ernie4_5 helium hunyuan_v1_dense phi3 arcee apertus granite hyperclovax gemma
    gemma2 gemma3_text vaultgemma olmo exaone4 glm glm4 cohere2 starcoder2 stablelm gpt_neox phi persimmon
    nemotron jais2 mixtral qwen2_moe qwen3_moe qwen3_vl_moe mellum granitemoe granitemoeshared dots1 glm4_moe
    solar_open exaone_moe hy_v3 hunyuan_v1_moe ernie4_5_moe
"""
"""Families whose weights have only common names."""

# Patterns of names after `layers.N.` that take precedence over `_COMMON`'s.
_OWN: Mapping[str, Mapping[str, Rule]] = {
    **{name: {} for name in _PLAIN.split()},
    "cohere": {  # a norm for each head
        r"self_attn\.q_norm\.weight": Rule.OUTPUTS,
        r"self_attn\.k_norm\.weight": Rule.KV_OUTPUTS,
    },
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2"), _ALL_HEADS),
    "gpt_oss": {
        r"mlp\.experts\.gate_up_proj(_bias)?": Rule.EXPERT_COLUMNS,  # gate and up alternate
        r"mlp\.experts\.down_proj": Rule.EXPERT_ROWS,
        r"mlp\.experts\.down_proj_bias": Rule.EXPERT_ONCE,
    },
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "mistral4", "youtu"), _LATENT
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA
    ),
    "olmo_hybrid": {
        r"linear_attn\.[qk]_(proj|conv1d)\.weight": Rule.KEY_HEADS,
        r"linear_attn\.(v|g|a|b)_proj\.weight": Rule.OUTPUTS,
        r"linear_attn\.conv1d\.weight": Rule.CHANNELS,
        r"linear_attn\.(v_conv1d\.weight|dt_bias|A_log)": Rule.OUTPUTS,
        r"linear_attn\.o_proj\.weight": Rule.MIXER_INPUTS,
        **_ALL_HEADS,
    },
    "kimi_linear": {
        r"self_attn\.[kv]_proj\.weight": Rule.OUTPUTS,  # of delta attention
        r"self_attn\.conv1d\.weight": Rule.THIRDS,
        r"self_attn\.([qkv]_conv1d|b_proj|g_b_proj|(forget_gate\.)?f_b_proj)\.weight": Rule.OUTPUTS,
        r"self_attn\.(forget_gate\.)?dt_bias": Rule.OUTPUTS,
        r"self_attn\.(forget_gate\.)?A_log": Rule.ONE_PER_HEAD,
        **_LATENT,
    },
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1"), _MAMBA2),
    "nemotron_h": {
        **_MAMBA2,
        r"mixer\.experts\.up_proj": Rule.EXPERT_OUTPUTS,
    },
    "jamba": {
        r"mamba\.in_proj\.(weight|bias)": Rule.PAIRED_OUTPUTS,
        r"mamba\.(conv1d|dt_proj)\.(weight|bias)": Rule.OUTPUTS,
        r"mamba\.(A_log|D)": Rule.OUTPUTS,
        r"mamba\.x_proj\.weight": Rule.INPUTS,
        r"mamba\.out_proj\.weight": Rule.MIXER_INPUTS,
        r"mamba\.out_proj\.bias": Rule.ONCE,
    },
    **dict.fromkeys(("lfm2", "lfm2_moe"), _SHORT_CONV),
}  # fmt: skip

RULES: Mapping[str, Mapping[str, Rule]] = {
    name: {**rules, **{k: v for k, v in _COMMON.items() if k not in rules}}
    for name, rules in _OWN.items()
}
"""By model_type: patterns of names after `layers.N.`, and their rules. The first match counts."""

_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_TOWER = re.compile(r"vision|visual|audio|(?:^|\.)mtp\.")
_HEAD = re.compile(r"(?:^|\.)(lm_head|embed_out)\.(weight|bias)$")


class Indivisible(Exception):
    """Names the part of a model that ranks cannot divide."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a tensor: ranges of dimension `dim` (negative), which has `width` entries in all."""

    rule: Rule
    dim: int
    ranges: Ranges
    width: int

    @property
    def length(self) -> int:
        return sum(end - start for start, end in self.ranges)

    @property
    def share(self) -> float:
        """The rank's share of the tensor, up to 1."""
        return self.length / self.width


CutOfWhole = tuple[Cut, tuple[int, ...]]
"""A cut, and the shape of the whole tensor."""


class Cuts:
    """The cuts of one model for one rank. geometry: of the whole model."""

    def __init__(self, geometry: ModelGeometry, shard: Shard) -> None:
        self.shard = shard
        self._geometry = geometry
        rules = RULES.get(geometry.model_type, {})
        self._rules = [(re.compile(pattern), rule) for pattern, rule in rules.items()]

    def rule_of(self, name: str) -> Rule | None:
        """Returns the rule of a weight by its name; None for a replicated weight."""
        if _HEAD.search(name):
            return Rule.VOCABULARY
        found = _IN_LAYER.search(name)
        if found is None or _TOWER.search(name):
            return None
        inner = found[2]
        return next((rule for pattern, rule in self._rules if pattern.fullmatch(inner)), None)

    def of(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Returns this rank's part of a whole tensor [*shape]; None for all of it.

        Raises Indivisible, but not for a model that a plan accepted.
        """
        rule = self.rule_of(name)
        if rule in (None, Rule.ONCE, Rule.EXPERT_ONCE):
            return None
        assert rule is not None
        dim = -len(shape)
        if rule in _LAST:
            dim = -1
        elif rule in _BEFORE_LAST:
            dim = -2
        elif rule is Rule.ONE_PER_HEAD:
            dim = next((n - len(shape) for n, size in enumerate(shape) if size > 1), -1)
        width = shape[dim]
        try:
            return Cut(rule, dim, self._ranges(rule, name, width), width)
        except Indivisible as fault:
            raise Indivisible(
                f"the width {fault} of {name} does not divide among {self.shard.size} ranks"
            ) from None

    def is_tower(self, name: str) -> bool:
        """Returns whether a weight is outside the decoder (such as a tower), so that every rank has it."""
        return _TOWER.search(name) is not None

    def kv_repeats(self, name: str) -> int:
        """Returns how many ranks have each KV head of this weight's layer."""
        return max(1, self.shard.size // self._layer(name).num_kv_heads)

    def _layer(self, name: str) -> LayerGeometry:
        found = _IN_LAYER.search(name)
        assert found is not None
        return self._geometry.layers[int(found[1])]

    def _ranges(self, rule: Rule, name: str, width: int) -> Ranges:
        shard = self.shard
        if rule is Rule.VOCABULARY:
            most = -(-width // shard.size)
            return ((min(width, shard.rank * most), min(width, (shard.rank + 1) * most)),)
        if rule in (Rule.PAIRED_OUTPUTS, Rule.EXPERT_PAIRED_OUTPUTS):
            return self._parts([width // 2] * 2)
        if rule is Rule.THIRDS:
            return self._parts([width // 3] * 3)
        if rule is Rule.QKV_OUTPUTS:
            layer = self._layer(name)
            q, kv = layer.num_q_heads, layer.num_kv_heads
            each = width // (q + 2 * kv)
            heads = self._parts([q, kv, kv], shared=(1, 2))
            return tuple((a * each, b * each) for a, b in heads)
        if rule in (Rule.KV_OUTPUTS, Rule.KV_HEADS_OF_A_NORM):
            kv = self._layer(name).num_kv_heads
            first, last = shard.kv_heads(kv)
            return ((first * (width // kv), last * (width // kv)),)
        if rule in _OF_RECURRENCES:
            found = recurrence_of(self._layer(name))
            assert found is not None, f"{name} belongs to no recurrence by heads"
            return self._ranges_of_recurrence(rule, found)
        return self._parts([width])

    def _ranges_of_recurrence(self, rule: Rule, found: Recurrence) -> Ranges:
        heads, key_heads, values = found.heads, found.key_heads, found.value_width
        if rule is Rule.KEY_HEADS:
            first, last = self.shard.kv_heads(key_heads)
            return ((first * found.keys, last * found.keys),)
        if rule in (Rule.BY_KEY_HEAD, Rule.STRENGTHS):
            served, start = heads // key_heads, 0
            parts = [served, served]  # numbers of one head of keys
            if rule is Rule.BY_KEY_HEAD:
                parts = [2 * found.keys, served * found.values, served * found.values]
            each, size = sum(parts), self.shard.size
            first, last = self.shard.kv_heads(key_heads)
            if key_heads >= size:
                return ((first * each, last * each),)
            place, sharing, ranges = self.shard.rank % (size // key_heads), size // key_heads, []
            for number, part in enumerate(parts):
                is_whole = rule is Rule.BY_KEY_HEAD and number == 0
                of_rank = part if is_whole else part // sharing
                at = first * each + start + (0 if is_whole else place * of_rank)
                ranges.append((at, at + of_rank))
                start += part
            return tuple(ranges)
        keys = found.keys
        if rule is Rule.CHANNELS:
            units = [(key_heads, keys), (key_heads, keys), (heads, found.values)]
            shared: tuple[int, ...] = (0, 1)
        elif rule is Rule.MAMBA_CHANNELS:
            units, shared = [(values, 1), (key_heads, keys), (key_heads, keys)], (1, 2)
        else:
            units = [(values, 1), (values, 1), (key_heads, keys), (key_heads, keys), (heads, 1)]
            shared = 2, 3
        counts, sizes = zip(*units, strict=True)
        return self._parts(counts, sizes, shared)

    def _parts(
        self, counts: Sequence[int], units: Sequence[int] | None = None, shared: Items = ()
    ) -> Ranges:
        """Returns this rank's ranges of a dimension in which several parts are concatenated.

        counts: number of members of each part, which ranks divide. units: entries of a member. shared: parts
        whose members are replicated if there are fewer of them than ranks.
        """
        found, begin, rank, size = [], 0, self.shard.rank, self.shard.size
        for place, count in enumerate(counts):
            unit = 1 if units is None else units[place]
            if place in shared:
                first, last = self.shard.kv_heads(count)
            else:
                if count % size:
                    raise Indivisible(count)
                first, last = rank * (count // size), (rank + 1) * (count // size)
            found.append((begin + first * unit, begin + last * unit))
            begin += count * unit
        return tuple(found)
