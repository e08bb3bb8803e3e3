"""The layers of a fused model as the compiled forward runs them: products, and other weights in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams
from kvant.models.cpu.linear import Linear
from kvant.models.cpu.weights import Code, pack, pack_narrow, pack_rounded
from kvant.models.fused import layers as fused
from kvant.models.fused.experts import Experts
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.linear import Apart, DenseLinear, JoinedLater, NarrowProduct
from kvant.models.fused.linear import Linear as AnyLinear
from kvant.models.fused.recipe import NormKind
from kvant.models.fused.routing import Routing
from kvant.models.recurrent.mixers import GatedDeltaNet

Products = tuple[Linear, ...]
"""Products of one input, with adjacent outputs; several if formats differ."""


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """An RMS norm.

    weight: float32 [width]. rounds_first: numbers are also rounded before the weight multiplies.
    """

    weight: Tensor
    eps: float
    rounds_first: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention layer. gated: in the result of qkv, each head of q is followed by its gate."""

    qkv: Products
    output: Products
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool
    params: AttentionParams

    @property
    def q_stride(self) -> int:
        """Distance between two heads of q, in numbers."""
        return self.head_dim * (2 if self.gated else 1)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views of q, k, v [T, heads, head_dim] in qkv [T, ..], without gates."""
        tokens, dim, kv = len(qkv), self.head_dim, self.num_kv_heads
        first = self.num_q_heads * self.q_stride
        q = qkv[:, :first].view(tokens, self.num_q_heads, self.q_stride)[..., :dim]
        others = qkv[:, first:].view(tokens, 2 * kv, dim)
        return q, others[:, :kv], others[:, kv:]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A gated delta net and its two products. conv: [taps, channels]. decay: -exp(A_log), [heads].

    bias: dt_bias, [heads]. All are float32.
    """

    net: GatedDeltaNet
    entry: Products
    exit: Products
    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: RmsNorm
    strongest: float


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A dense feed-forward layer, silu(gate) * up between two products. up: rows of gates, then of ups."""

    up: Products
    down: Products


@dataclass(frozen=True, slots=True)
class Mixture:
    """A layer of experts.

    gate_up: [E, 2 I, H], down: [E, H, I], unquantised. shared_gate: float32 [H], or None.
    """

    routing: Routing
    router: Linear
    gate_up: Tensor
    down: Tensor
    shared: FeedForward | None
    shared_gate: Tensor | None


@dataclass(frozen=True, slots=True)
class Part:
    """A decoder layer."""

    input_norm: RmsNorm
    mix: Attention | Recurrence
    post_norm: RmsNorm
    feed_forward: FeedForward | Mixture

    @property
    def linears(self) -> list[Linear]:
        """All products of the layer, except those of experts."""
        mix, forward = self.mix, self.feed_forward
        ends = (mix.qkv, mix.output) if isinstance(mix, Attention) else (mix.entry, mix.exit)
        found = [linear for some in ends for linear in some]
        if isinstance(forward, Mixture):
            found.append(forward.router)
            if forward.shared is None:
                return found
            forward = forward.shared
        return [*found, *forward.up, *forward.down]


def refuse_experts(experts: Experts) -> str | None:
    """Returns why compiled code cannot compute a layer of experts, or None."""
    if experts.is_narrow:
        return "its experts' weights are narrow"
    if experts.clamp is not None or experts.gate_up[1] is not None or experts.down[1] is not None:
        return "its experts have biases or clamped activations"
    if not experts.routing.is_softmax or experts.correction is not None:
        return "it chooses experts by other scores than a softmax"
    return None


def read_part(
    layer: fused.Layer | fused.MixerLayer | fused.LatentLayer, code: Code | None, digits: int
) -> Part:
    """Reads a layer.

    code: to what unquantised weights are rounded, None for no rounding. digits: of activations.
    """
    assert not isinstance(layer, fused.LatentLayer)
    mix: Attention | Recurrence
    if isinstance(layer, fused.MixerLayer):
        assert isinstance(layer.mixer, GatedDeltaNet)
        mix = _recurrence(layer.mixer)
    else:
        norms = layer.qk_norms
        mix = Attention(
            products(layer.qkv, code, digits),
            products(layer.output, code, digits),
            None if norms is None else read_norm(norms.q),
            None if norms is None else read_norm(norms.k),
            layer.num_q_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.gated,
            layer.params,
        )
    forward = layer.feed_forward
    return Part(
        read_norm(layer.attn_in),
        mix,
        read_norm(layer.ffn_in),
        _dense(forward, code, digits) if isinstance(forward, Dense) else _mixture(forward, digits),
    )


def _dense(dense: Dense, code: Code | None, digits: int) -> FeedForward:
    return FeedForward(products(dense.up, code, digits), products(dense.down, code, digits))


def _mixture(experts: Experts, digits: int) -> Mixture:
    (weight, bias), gate_up, down = experts.router, experts.gate_up[0], experts.down[0]
    assert refuse_experts(experts) is None
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    shared, gate = None, None
    if experts.shared is not None:
        shared = _dense(experts.shared.dense, None, digits)
        if experts.shared.gate is not None:
            assert isinstance(experts.shared.gate, DenseLinear)
            gate = experts.shared.gate.weight.detach().to(torch.float32)[0].clone()
    return Mixture(
        experts.routing,
        Linear(pack(weight.detach(), None), bias),
        gate_up.detach().contiguous(),
        down.detach().contiguous(),
        shared,
        gate,
    )


def _recurrence(net: GatedDeltaNet) -> Recurrence:
    m = net.module
    norm = m.o_norm if hasattr(m, "o_norm") else m.norm
    return Recurrence(
        net,
        (Linear(pack(net.entry.detach(), None), None),),
        (Linear(pack(net.exit.detach(), None), None),),
        m.conv1d.weight[:, 0].detach().to(torch.float32).T.contiguous(),
        -m.A_log.detach().to(torch.float32).exp(),
        m.dt_bias.detach().to(torch.float32).clone(),
        RmsNorm(norm.weight.detach().to(torch.float32), norm.variance_epsilon, rounds_first=True),
        net.strongest,
    )


def products(given: AnyLinear, code: Code | None, digits: int) -> Products:
    """Packs a product's weights in tiles.

    Only unquantised weights are rounded to `code`, if it is not None.
    """
    if isinstance(given, Apart):
        return tuple(linear for part in given.parts for linear in products(part, code, digits))
    if isinstance(given, NarrowProduct):
        return (Linear(pack_narrow(given.weight), given.bias, digits),)
    if isinstance(given, JoinedLater):
        assert code is not None
        return (Linear(pack_rounded(given.weights, code), given.bias, digits),)
    assert isinstance(given, DenseLinear)
    return (Linear(pack(given.weight.detach(), code), given.bias, digits),)


def read_norm(norm: fused.Norm | None) -> RmsNorm:
    """Reads an RMS norm with a weight."""
    assert norm is not None
    assert norm.weight is not None
    assert norm.kind.is_rms
    weight = norm.weight.detach().to(torch.float32)
    if norm.kind is NormKind.RMS_ONE:
        weight = 1.0 + weight
    return RmsNorm(weight, norm.eps, norm.kind is NormKind.RMS)
