"""What a family's forward computes, as data: kinds of norms, rotations, activations and places. No torch.

A `Recipe` names the parts of a transformers module and says how they are put together.
`kvant.models.fused.recipes` is the table; `kvant.models.fused.read` reads a module by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from kvant.models.geometry.parameters import QKNorm

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class NormKind(Enum):
    """Arithmetic of a norm; x^ is the row over its root mean square, or standardised by LAYER kinds."""

    RMS = "w * cast(x^)"
    RMS_WIDE = "cast(w * x^)"
    RMS_ONE = "cast((1 + w) * x^)"
    LAYER = "cast(w * x^ + b)"
    LAYER_ONE = "cast((1 + w) * x^ + b)"

    @property
    def is_rms(self) -> bool:
        return self in (NormKind.RMS, NormKind.RMS_WIDE, NormKind.RMS_ONE)


class Activation(Enum):
    """Functions of single numbers, by transformers' most common name."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu2"


_ACTIVATIONS = {
    **{one.value: one for one in Activation},
    "swish": Activation.SILU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_python": Activation.GELU,
}


def activation_of(name: object) -> Activation | None:
    """The activation of transformers' name; None for one that the decoder does not compute."""
    return _ACTIVATIONS.get(name) if isinstance(name, str) else None


class Pairing(Enum):
    """Which two numbers of a head a rotation turns."""

    HALVES = "i and i + R / 2"
    NEIGHBOURS = "2 i and 2 i + 1"


class Angles(Enum):
    """What a module of rotary embeddings gives for R numbers of a head."""

    TWICE = "all R / 2 cosines, and all again"
    COMPLEX = "R / 2 numbers cos + i sin"
    NEIGHBOURS = "each of the R / 2 cosines twice"
    ONCE = "R / 2 cosines"


class Rotated(Enum):
    """Layers whose queries and keys are rotated."""

    ALL = "all"
    WINDOWED = "those with a window"
    WINDOWED_IF_ANY = "those with a window, or all where the config has no window"
    FLAGGED = "those whose attention has use_rope"
    NAMED = "all, where the config's position_embedding_type is rope"


@dataclass(frozen=True, slots=True)
class Block:
    """Names of a layer's norms by place; None for no norm there.

    parallel: attention and feed-forward read the same sum; with ffn_in None, the same norm of it. A name
    is the config's flag.
    residual_multiplier: the layer's attribute that multiplies what is added to the residual sum.
    """

    attn_in: str | None = "input_layernorm"
    attn_out: str | None = None
    ffn_in: str | None = "post_attention_layernorm"
    ffn_out: str | None = None
    parallel: bool | str = False
    residual_multiplier: str | None = None

    @property
    def is_pre_norm(self) -> bool:
        """Whether layers are x + f(norm(x)) and nothing else."""
        inputs = self.attn_in is not None and self.ffn_in is not None
        outputs = self.attn_out is not None or self.ffn_out is not None
        return inputs and not outputs and not self.parallel and self.residual_multiplier is None


@dataclass(frozen=True, slots=True)
class Attend:
    """Names and kinds of an attention module.

    projections: q, k and v, or one that is joined. qk_norm: what a norm of q and k spans.
    qk_kind: its arithmetic, None for the layers'. norm_after: it follows the rotation.
    clip: the config's field for a limit on q, k and v. by_head: a joined projection has q, k and v of
    head 0, then of head 1, .. position_scale: queries grow with the logarithm of their position.
    gated: q has a gate for each head behind it. latent: keys and values of all heads come from one latent
    (`kvant.models.fused.latent`), under DeepSeek's names. interleaved: the config's field that chooses
    between the pairings.
    """

    module: str = "self_attn"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    qk_norm: QKNorm = QKNorm.NONE
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    qk_kind: NormKind | None = None
    norm_after: bool = False
    pairing: Pairing = Pairing.HALVES
    angles: Angles = Angles.TWICE
    rotated: Rotated = Rotated.ALL
    clip: str | None = None
    gated: bool = False
    by_head: bool = False
    position_scale: bool = False
    latent: bool = False
    interleaved: str | None = None


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Names of a dense feed-forward module.

    up: gate and up, one that is joined (gates first), or up alone where gated is False.
    activation: transformers' default; field: the config's field that says another. own: the attribute
    that is an activation with weights of its own.
    """

    module: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gated: bool = True
    activation: Activation = Activation.SILU
    field: str = "hidden_act"
    own: str | None = None


class RouterKind(Enum):
    """How scores of experts become weights."""

    SOFTMAX_TOP_K = "softmax, top-k"
    TOP_K_SOFTMAX = "top-k, softmax"
    SIGMOID = "sigmoid, top-k of the biased ones"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Names and kinds of layers of experts; a layer without `experts` is dense.

    router: the module with weight [E, H]. renormalise: weights are divided by their sum; a name is a
    flag of the router or the block. rounded: weights take the model's dtype. wide: logits are computed
    in float32. scale: a factor on weights. groups: numbers of groups and of chosen groups. grouped: the
    router's attribute, and its value without which groups do not count. by_best: a group's score is
    its best expert's. bias: a correction of scores in the choice.
    transposed: weights are [E, in, out]. alternating: rows are gate 0, up 0, gate 1, ..; clamped: the
    activation (up + 1) * gate * sigmoid(alpha * gate) of clamped numbers.
    shared: the expert of all tokens, in the block or the layer, or the dense layer in place of a block that
    is None; shared_gate: its gate;
    shared_names: of its parts, where they are not those of dense layers.
    """

    router: str = "gate"
    experts: str = "experts"
    kind: RouterKind = RouterKind.SOFTMAX_TOP_K
    renormalise: bool | str = True
    rounded: bool = False
    wide: bool = False
    scale: str | None = None
    groups: tuple[str, str] | None = None
    grouped: tuple[str, str] | None = None
    by_best: bool = False
    bias: str | None = None
    transposed: bool = False
    alternating: bool = False
    clamped: bool = False
    shared: str | None = None
    shared_gate: str | None = None
    shared_names: FeedForward | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A family's forward.

    module_class: name of the decoder's class in transformers, such as "LlamaModel". only: values
    that a config may have in fields on which the computation depends; None stands for no field.
    embed_scale: the decoder's attribute that multiplies embeddings. logits_divided, logits_times,
    logits_cap: the config's fields. by_layer_type: angles are of the layer's type. partial: a rotation
    may leave the end of a head alone. mixers: some layers mix tokens by a recurrence and do not attend.
    """

    module_class: str
    norm: NormKind = NormKind.RMS
    block: Block = field(default_factory=Block)
    attention: Attend = field(default_factory=Attend)
    feed_forward: FeedForward = field(default_factory=FeedForward)
    mixture: Mixture | None = None
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    embed_scale: str | None = None
    logits_divided: str | None = None
    logits_times: str | None = None
    logits_cap: str | None = None
    by_layer_type: bool = False
    partial: bool = False
    mixers: bool = False
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _NOTHING)

    @property
    def is_plain(self) -> bool:
        """Whether layers that attend are Llama's, up to biases, windows, gates and norms of heads.

        Other layers, and layers of experts, are not looked at.
        """
        attention, forward = self.attention, self.feed_forward
        return (
            self.norm.is_rms
            and self.block.is_pre_norm
            and (attention.qk_kind is None or attention.qk_kind.is_rms)
            and attention.qk_norm is not QKNorm.ROW
            and not attention.norm_after
            and attention.pairing is Pairing.HALVES
            and attention.interleaved is None
            and attention.rotated is Rotated.ALL
            and attention.clip is None
            and not attention.by_head
            and not attention.latent
            and not attention.position_scale
            and forward.own is None
            and forward.gated
            and forward.activation is Activation.SILU
            and not self.by_layer_type
            and not self.changes_ends
        )

    @property
    def changes_ends(self) -> bool:
        """Whether embeddings or logits are multiplied or capped."""
        names = self.embed_scale, self.logits_divided, self.logits_times, self.logits_cap
        return any(name is not None for name in names)
