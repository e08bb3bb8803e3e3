"""A model as Kvant's own decoder runs it: weights, and which computation each of them takes part in."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvant.attention.base import AttentionParams
from kvant.models.fused.experts import Experts
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.linear import Linear
from kvant.models.fused.recipe import NormKind, Pairing
from kvant.models.recurrent.mixers import Mixer
from kvant.weights.codecs import NarrowWeight


@dataclass(frozen=True, slots=True)
class Norm:
    """weight: [width], [heads, head_dim] for heads that differ, or None for ones. bias: [width] or None."""

    kind: NormKind
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class QKNorms:
    """Norms of queries and keys. whole: over all heads together. after: they follow the rotation."""

    q: Norm
    k: Norm
    whole: bool = False
    after: bool = False

    @property
    def of_heads(self) -> bool:
        """Whether they are root-mean-square norms of every head, with one weight, before the rotation."""
        return (
            self.q.kind.is_rms
            and not self.whole
            and not self.after
            and self.q.weight is not None
            and self.q.weight.ndim == 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What every decoder layer has around that which mixes its tokens.

    attn_in, attn_out, ffn_in, ffn_out: norms of what attention and feed-forward read and of what they
    give; None for no norm. factor: on what is added to the residual sum.
    """

    attn_in: Norm | None
    attn_out: Norm | None
    ffn_in: Norm | None
    ffn_out: Norm | None
    feed_forward: Dense | Experts
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Frame):
    """A decoder layer with attention. qkv: rows of queries, keys and values.

    rotary: which of the model's angles turn q and k; None for none. clip: limit on numbers of qkv.
    by_head: rows of qkv are those of head 0, then of head 1, .. position_scale: queries are multiplied
    by 1 + a log(1 + floor(position / b)) for its (a, b). gated: rows of a head's queries are followed by
    those of its gate, whose sigmoid multiplies what the head attends to.
    """

    qkv: Linear
    output: Linear
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norms: QKNorms | None
    rotary: int | None
    pairing: Pairing
    clip: float | None
    by_head: bool
    position_scale: tuple[float, float] | None
    params: AttentionParams
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerLayer(Frame):
    """A decoder layer that mixes tokens by a recurrence."""

    mixer: Mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer(Frame):
    """A decoder layer that stores one latent of a token for all heads: see `kvant.models.fused.latent`.

    entry: rows of queries, or of what q_up takes once q_norm has normalised it; then of the latent and
    the rotary key. kv_norm: of the latent. expanding: [num_q_heads, nope + v, L], a head's key and value
    of a latent. nope, rotary_width: numbers of a key without and with a rotation. The other fields as in
    `Layer`.
    """

    entry: Linear
    q_norm: Norm | None
    q_up: Linear | None
    kv_norm: Norm
    expanding: Tensor
    nope: int
    output: Linear
    num_q_heads: int
    rotary_width: int
    rotary: int
    pairing: Pairing
    position_scale: tuple[float, float] | None
    params: AttentionParams

    @property
    def keys(self) -> Tensor:
        """[num_q_heads, nope, L]."""
        return self.expanding[:, : self.nope]

    @property
    def values(self) -> Tensor:
        """[num_q_heads, L, v]."""
        return self.expanding[:, self.nope :].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Model:
    """All layers, and what comes before and behind them.

    embedding: [vocab_size, hidden_size], without rows where it is narrow: `table` has them then. embed_scale:
    factor on embeddings. parallel: attention and feed-forward of a layer read the same sum. logits: times
    logits_scale, then capped at logits_cap (0 for none).
    """

    layers: tuple[Layer | LatentLayer | MixerLayer, ...]
    embedding: Tensor
    embed_scale: float
    norm: Norm
    head: Linear
    parallel: bool
    logits_scale: float
    logits_cap: float
    table: NarrowWeight | None = None

    @property
    def folds_norms(self) -> bool:
        """Whether a norm's scale may be applied behind the product that reads it, in every layer."""
        return (
            not self.parallel
            and self.embed_scale == 1.0
            and self.norm.kind.is_rms
            and all(_folds(layer) for layer in self.layers)
        )


def _folds(layer: Layer | LatentLayer | MixerLayer) -> bool:
    return (
        not isinstance(layer, LatentLayer)
        and layer.attn_out is None
        and layer.ffn_out is None
        and layer.factor == 1.0
        and _plain(layer.attn_in)
        and _plain(layer.ffn_in)
    )


def _plain(norm: Norm | None) -> bool:
    return norm is not None and norm.weight is not None and norm.kind.is_rms
