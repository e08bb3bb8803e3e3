"""A model as Kvant's own decoder runs it: the weights of each layer, and what it computes with them."""

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
    """A norm. weight: [width], [heads, head_dim] if heads differ, None for ones. bias: [width] or None."""

    kind: NormKind
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class QKNorms:
    """Norms of queries and keys. whole: over all heads together. after: applied after the rotation."""

    q: Norm
    k: Norm
    whole: bool = False
    after: bool = False

    @property
    def of_heads(self) -> bool:
        """Whether both are RMS norms of each head, with one weight for all heads, before the rotation."""
        return (
            self.q.kind.is_rms
            and not self.whole
            and not self.after
            and self.q.weight is not None
            and self.q.weight.ndim == 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The parts of a decoder layer around attention or a recurrence.

    attn_in, ffn_in: norms before attention (or the recurrence) and before the feed-forward layer. attn_out,
    ffn_out: norms of their results. None for no norm. factor: multiplies what is added to the residual sum.
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

    rotary: index of the model's rotary angles for q and k; None for none. clip: numbers of qkv are clamped to
    -clip .. clip. by_head: rows of qkv are those of head 0, then of head 1, .. position_scale: (a, b);
    queries are multiplied by 1 + a log(1 + floor(position / b)). gated: rows of a head's queries are followed
    by rows of its gate, whose sigmoid multiplies the head's attention output.
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
    """A decoder layer that stores one latent per token for all heads: see `kvant.models.fused.latent`.

    entry: rows of queries, then of the latent and the rotary key. If q_up is not None, the first rows are the
    input of q_norm, whose result q_up turns into queries. kv_norm: norm of the latent. expanding:
    [num_q_heads, nope + v, L], turns a latent into a head's key and value. nope, rotary_width: width of the
    part of a key without and with rotation. Other fields: as in `Layer`.
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
        """Returns a view [num_q_heads, nope, L] of the key rows of `expanding`."""
        return self.expanding[:, : self.nope]

    @property
    def values(self) -> Tensor:
        """Returns a view [num_q_heads, L, v] of the value rows of `expanding`, transposed."""
        return self.expanding[:, self.nope :].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Model:
    """All layers, the embedding and the head.

    embedding: [vocab_size, hidden_size]; without rows if the embedding is narrow, which is then in `table`.
    embed_scale: multiplies embeddings. parallel: attention and feed-forward of a layer read the same residual
    sum. Logits are multiplied by logits_scale, then capped at logits_cap (0 for none).
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
        """Whether every layer's norm scales can be applied after the product that reads the norm."""
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
