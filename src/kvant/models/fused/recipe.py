"""What a family's forward computes, as data: norms, rotations, activations and names of modules. No torch.

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
    """Formula of a norm. x^: the row divided by its root mean square, or standardised for LAYER kinds."""

    RMS = "w * cast(x^)"
    RMS_WIDE = "cast(w * x^)"
    RMS_ONE = "cast((1 + w) * x^)"
    LAYER = "cast(w * x^ + b)"
    LAYER_ONE = "cast((1 + w) * x^ + b)"

    @property
    def is_rms(self) -> bool:
        return self in (NormKind.RMS, NormKind.RMS_WIDE, NormKind.RMS_ONE)


class Activation(Enum):
    """Elementwise functions, by transformers' most common name."""

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
    """Returns the activation with this name in transformers; None for one that the decoder lacks."""
    return _ACTIVATIONS.get(name) if isinstance(name, str) else None


class Pairing(Enum):
    """Which two of the R rotated numbers of a head form a pair."""

    HALVES = "i and i + R / 2"
    NEIGHBOURS = "2 i and 2 i + 1"


class Angles(Enum):
    """What a transformers module of rotary embeddings returns for R rotated numbers of a head."""

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
    """Attribute names of a layer's norms by place; None for no norm there.

    parallel: attention and feed-forward read the same residual sum; with ffn_in None, the same norm of it. A
    string names the config's flag.
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
    """Attribute names and kinds of an attention module.

    projections: q, k and v, or one joined projection. qk_norm: what a norm of q and k spans. qk_kind: its
    formula, None for that of the layers. norm_after: the norm follows the rotation. clip: the config's field
    for a limit on q, k and v. by_head: a joined projection has q, k and v of head 0, then of head 1, ..
    position_scale: queries grow with the logarithm of their position. gated: in q, each head is followed by
    its gate. latent: keys and values of all heads come from one latent (`kvant.models.fused.latent`), with
    DeepSeek's names. interleaved: the config's flag that chooses between the pairings.
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
    """Attribute names of a dense feed-forward module.

    up: gate and up, one joined projection (gates first), or only up if gated is False.
    activation: transformers' default. field: the config's field that names another. own: the attribute
    with an activation that has its own weights.
    """

    module: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gated: bool = True
    activation: Activation = Activation.SILU
    field: str = "hidden_act"
    own: str | None = None


class RouterKind(Enum):
    """How router logits become the weights of the chosen experts."""

    SOFTMAX_TOP_K = "softmax, top-k"
    TOP_K_SOFTMAX = "top-k, softmax"
    SIGMOID = "sigmoid, top-k of the biased ones"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Attribute names and kinds of layers of experts; a layer without `experts` is dense.

    router: the module with weight [E, H]. renormalise: weights are divided by their sum; a string names a
    flag of the router or the block. rounded: weights take the model's dtype. wide: logits are computed in
    float32. scale: attribute that multiplies weights. groups: attributes with the numbers of groups and of
    chosen groups. grouped: the router's attribute, and the value that it must have for groups to count.
    by_best: a group's score is its best expert's. bias: attribute with a correction of the scores that choose
    experts. transposed: weights are [E, in, out]. alternating: rows are gate 0, up 0, gate 1, ..; clamped:
    the activation is (up + 1) * gate * sigmoid(alpha * gate), of clamped numbers. shared: the expert of all
    tokens, in the block or the layer; or the dense layer that replaces a block that is None. shared_gate: its
    gate. shared_names: of its parts, if they differ from those of dense layers.
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

    module_class: name of the decoder's class in transformers, such as "LlamaModel". only: allowed values of
    config fields on which the computation depends; None allows a missing field. embed_scale: the decoder's
    attribute that multiplies embeddings. logits_divided, logits_times, logits_cap: the config's fields.
    by_layer_type: rotary angles depend on the layer's type. partial: a rotation may leave the end of a head
    unchanged. mixers: some layers have a recurrence instead of attention.
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
        """Whether layers with attention are Llama's, except for biases, windows, gates and norms of heads.

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
