"""Operations between two matrix products; here in plain torch.

Values round where transformers' modules round, so that both give the same logits up to the order of
sums.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.fused.feed_forward import Apply, activate, call_directly
from kvant.models.fused.layers import Norm, QKNorms
from kvant.models.fused.recipe import Activation, NormKind, Pairing
from kvant.models.invariant.vectors import by_whole_vectors
from kvant.weights.codecs import round_activations
from kvant.weights.rounding import RoundedRows, Rounding


class Kernels(Protocol):
    """T tokens, all tensors on one device."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x [T, width], normalised."""
        ...

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        *,
        before: Norm | None = None,
        factor: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The sum of residual and factor times x [T, width], normalised, and the sum itself.

        before: norm of x before it is added. norm: None for the sum itself twice. May reuse both.
        """
        ...

    def add_norm_rounded(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm,
        rounding: Rounding,
        *,
        before: Norm | None = None,
        factor: float = 1.0,
    ) -> tuple[RoundedRows, Tensor]:
        """`add_norm`, with the normalised rows [T, width] rounded to e4m3."""
        ...

    def rotate(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        norms: QKNorms | None = None,
        pairing: Pairing = Pairing.HALVES,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [T, heads, head_dim] of qkv [T, (Hq + 2 Hkv) * head_dim], q and k rotated.

        cos, sin: [T, R / 2]; pairs (a, b) of the first R numbers of a head become
        (a cos - b sin, b cos + a sin). norms: of heads, not of whole rows. May work in place.
        """
        ...

    def rotate_latent(
        self, q: Tensor, row: Tensor, norm: Norm, cos: Tensor, sin: Tensor, pairing: Pairing
    ) -> tuple[Tensor, Tensor]:
        """q [T, heads, nope + R] and row [T, L + R]: last R numbers rotated, first L of row normalised.

        cos, sin: [T, R / 2], as in `rotate`. May work in place.
        """
        ...

    def norm_whole(self, qkv: Tensor, q_width: int, k_width: int, norms: QKNorms) -> Tensor:
        """qkv [T, ..] with all its queries normalised together, and all its keys. May work in place."""
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up of gate_up [T, 2 * width]."""
        ...

    def gate_rounded(
        self, gate_up: Tensor, activation: Activation, rounding: Rounding
    ) -> RoundedRows:
        """`gate`, with its rows [T, width] rounded to e4m3."""
        ...

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """x: [T, width]."""
        ...

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, heads * head_dim] times the sigmoid of gate [T, heads, head_dim]. May reuse x."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """x: [..]."""
        ...

    def tanh(self, x: Tensor) -> Tensor:
        """x: [..]."""
        ...


class TorchKernels:
    """Any device, any dtype. apply: calls functions of single numbers."""

    def __init__(self, apply: Apply = call_directly) -> None:
        self._call = apply

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if not norm.kind.is_rms:
            return _layer_norm(x, norm)
        wide = self._wide(x)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        if norm.weight is None:
            return normed.to(x.dtype)
        if norm.kind is NormKind.RMS:
            return norm.weight * normed.to(x.dtype)
        weight = norm.weight
        if norm.kind is NormKind.RMS_ONE:
            weight = 1.0 + self._wide(weight)
        return (normed * weight).to(x.dtype)

    def _wide(self, x: Tensor) -> Tensor:
        """Modules of transformers normalise in float32, also numbers that are wider."""
        return x.to(torch.float32)

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        *,
        before: Norm | None = None,
        factor: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        if before is not None:
            x = self.norm(x, before)
        total = residual + (x if factor == 1.0 else x * factor)
        return (total if norm is None else self.norm(total, norm)), total

    def add_norm_rounded(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm,
        rounding: Rounding,
        *,
        before: Norm | None = None,
        factor: float = 1.0,
    ) -> tuple[RoundedRows, Tensor]:
        normed, total = self.add_norm(x, residual, norm, before=before, factor=factor)
        return round_activations(normed, rounding), total

    def rotate(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        norms: QKNorms | None = None,
        pairing: Pairing = Pairing.HALVES,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(qkv.shape[0], num_q_heads + 2 * num_kv_heads, -1)
        q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None and not norms.after:
            q, k = self.norm(q, norms.q), self.norm(k, norms.k)
        q, k = _rotated(q, cos, sin, pairing), _rotated(k, cos, sin, pairing)
        if norms is not None and norms.after:
            q, k = self.norm(q, norms.q), self.norm(k, norms.k)
        return q, k, v

    def rotate_latent(
        self, q: Tensor, row: Tensor, norm: Norm, cos: Tensor, sin: Tensor, pairing: Pairing
    ) -> tuple[Tensor, Tensor]:
        size = 2 * cos.shape[-1]
        latent = self.norm(row[:, :-size].contiguous(), norm)
        q_turned = _rotated(q[..., -size:], cos, sin, pairing).to(q.dtype)
        k_turned = _rotated(row[:, None, -size:], cos, sin, pairing)[:, 0].to(row.dtype)
        return torch.cat([q[..., :-size], q_turned], -1), torch.cat([latent, k_turned], -1)

    def norm_whole(self, qkv: Tensor, q_width: int, k_width: int, norms: QKNorms) -> Tensor:
        q, k, v = torch.split(qkv, [q_width, k_width, qkv.shape[1] - q_width - k_width], dim=1)
        return torch.cat((self.norm(q, norms.q), self.norm(k, norms.k), v), dim=1)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, activation, self._call) * up

    def gate_rounded(
        self, gate_up: Tensor, activation: Activation, rounding: Rounding
    ) -> RoundedRows:
        return round_activations(self.gate(gate_up, activation), rounding)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return activate(x, activation, self._call)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._call(torch.sigmoid, x)

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * self.sigmoid(gate).reshape(x.shape)

    def tanh(self, x: Tensor) -> Tensor:
        return self._call(torch.tanh, x)


class WideTorchKernels(TorchKernels):
    """Norms of float64 in float64, which transformers' modules compute in float32."""

    def _wide(self, x: Tensor) -> Tensor:
        return x if x.dtype is torch.float64 else super()._wide(x)


class InvariantTorchKernels(TorchKernels):
    """The same on a CPU, where torch's SiLU depends on a number's position; the rest does not."""

    def __init__(self) -> None:
        super().__init__(by_whole_vectors)


def _layer_norm(x: Tensor, norm: Norm) -> Tensor:
    weight = norm.weight
    if weight is not None and norm.kind is NormKind.LAYER_ONE:
        weight = weight + 1
    if weight is None or weight.ndim == 1:
        return F.layer_norm(x, x.shape[-1:], weight, norm.bias, norm.eps)
    normed = F.layer_norm(x.to(torch.float32), x.shape[-1:], None, None, norm.eps)
    return (weight.to(torch.float32) * normed).to(x.dtype)  # a weight for each head


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """x [T, heads, head_dim], of which 2 * cos.shape[-1] numbers turn."""
    size = 2 * cos.shape[-1]
    if size == 0:
        return x
    rest = x[..., size:]
    cos, sin = cos[:, None], sin[:, None]
    if pairing is Pairing.HALVES:
        a, b = x[..., :size].chunk(2, dim=-1)
        parts = [a * cos - b * sin, b * cos + a * sin]
    else:
        a, b = x[..., :size:2], x[..., 1:size:2]
        parts = [torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)]
    return torch.cat((*parts, rest), dim=-1)
