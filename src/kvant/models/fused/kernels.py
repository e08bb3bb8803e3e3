"""Operations between two matrix products: their interface, and plain torch.

Values round where transformers' modules round, so logits differ only by the order of sums.
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
    """Operations between products. T: tokens of a step.

    All tensors are on one device and have the compute dtype, unless an operation rounds them.
    """

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Returns x [T, width], normalised."""
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
        """Adds factor * x [T, width] to residual [T, width]; returns the sum normalised, and the sum.

        before: a norm that x passes before it is added. norm: None returns the sum twice. May overwrite x
        and residual.
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
        """Implements `add_norm` with the normalised rows [T, width] rounded to e4m3."""
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
        """Returns q, k, v [T, heads, head_dim] of qkv [T, (Hq + 2 Hkv) * head_dim], with q and k rotated.

        cos, sin: [T, R / 2]. Pairs (a, b) of the first R numbers of a head become (a cos - b sin, b cos + a
        sin). norms: of single heads, not of whole rows. May work in place.
        """
        ...

    def rotate_latent(
        self, q: Tensor, row: Tensor, norm: Norm, cos: Tensor, sin: Tensor, pairing: Pairing
    ) -> tuple[Tensor, Tensor]:
        """Rotates the last R numbers of q [T, heads, nope + R] and row [T, L + R]; normalises row's first L.

        cos, sin: [T, R / 2], as in `rotate`. May work in place.
        """
        ...

    def norm_whole(self, qkv: Tensor, q_width: int, k_width: int, norms: QKNorms) -> Tensor:
        """Normalises all queries of qkv [T, ..] of a token together, and all its keys. May work in place."""
        ...

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Returns activation(gate) * up, [T, width], of gate_up [T, 2 * width]."""
        ...

    def gate_rounded(
        self, gate_up: Tensor, activation: Activation, rounding: Rounding
    ) -> RoundedRows:
        """Implements `gate` with the result [T, width] rounded to e4m3."""
        ...

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """Applies an activation to x [T, width]."""
        ...

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns x [T, heads * head_dim] times the sigmoid of gate [T, heads, head_dim]. May overwrite x."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """Returns the sigmoid of x [..]."""
        ...

    def tanh(self, x: Tensor) -> Tensor:
        """Returns the hyperbolic tangent of x [..]."""
        ...


class TorchKernels:
    """Plain torch for any device and dtype. apply: calls elementwise functions."""

    def __init__(self, apply: Apply = call_directly) -> None:
        self._call = apply

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Implements `Kernels.norm`: x [T, width]."""
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
        """Casts x to float32: transformers' modules normalise in float32, float64 numbers too."""
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
        """Implements `Kernels.add_norm`: x, residual [T, width]. Overwrites neither."""
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
        """Implements `Kernels.add_norm_rounded`: x, residual [T, width]."""
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
        """Implements `Kernels.rotate`: qkv [T, (Hq + 2 Hkv) * head_dim]; cos, sin [T, R / 2]."""
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
        """Implements `Kernels.rotate_latent`: q [T, heads, nope + R]; row [T, L + R]; cos, sin [T, R / 2]."""
        size = 2 * cos.shape[-1]
        latent = self.norm(row[:, :-size].contiguous(), norm)
        q_turned = _rotated(q[..., -size:], cos, sin, pairing)
        k_turned = _rotated(row[:, None, -size:], cos, sin, pairing)[:, 0]
        return torch.cat([q[..., :-size], q_turned], -1), torch.cat([latent, k_turned], -1)

    def norm_whole(self, qkv: Tensor, q_width: int, k_width: int, norms: QKNorms) -> Tensor:
        """Implements `Kernels.norm_whole`: qkv [T, ..]."""
        q, k, v = torch.split(qkv, [q_width, k_width, qkv.shape[1] - q_width - k_width], dim=1)
        return torch.cat((self.norm(q, norms.q), self.norm(k, norms.k), v), dim=1)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Implements `Kernels.gate`: gate_up [T, 2 * width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return activate(gate, activation, self._call) * up

    def gate_rounded(
        self, gate_up: Tensor, activation: Activation, rounding: Rounding
    ) -> RoundedRows:
        """Implements `Kernels.gate_rounded`: gate_up [T, 2 * width]."""
        return round_activations(self.gate(gate_up, activation), rounding)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """Implements `Kernels.activate`: x [T, width]."""
        return activate(x, activation, self._call)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Implements `Kernels.sigmoid`: x [..]."""
        return self._call(torch.sigmoid, x)

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """Implements `Kernels.gate_heads`: x [T, heads * head_dim]; gate [T, heads, head_dim]."""
        return x * self.sigmoid(gate).reshape(x.shape)

    def tanh(self, x: Tensor) -> Tensor:
        """Implements `Kernels.tanh`: x [..]."""
        return self._call(torch.tanh, x)


class WideTorchKernels(TorchKernels):
    """Normalises float64 in float64, where transformers' modules use float32."""

    def _wide(self, x: Tensor) -> Tensor:
        return x if x.dtype is torch.float64 else super()._wide(x)


class InvariantTorchKernels(TorchKernels):
    """Batch-invariant `TorchKernels` for CPUs: torch's SiLU there depends on a number's position."""

    def __init__(self) -> None:
        super().__init__(by_whole_vectors)


def _layer_norm(x: Tensor, norm: Norm) -> Tensor:
    weight = norm.weight
    if weight is not None and norm.kind is NormKind.LAYER_ONE:
        weight = weight + 1
    if weight is None or weight.ndim == 1:
        return F.layer_norm(x, x.shape[-1:], weight, norm.bias, norm.eps)
    normed = F.layer_norm(x.to(torch.float32), x.shape[-1:], None, None, norm.eps)
    return (weight.to(torch.float32) * normed).to(x.dtype)  # weight may be [heads, head_dim]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """Rotates the first 2 * cos.shape[-1] numbers of each head of x [T, heads, head_dim]; keeps its dtype.

    Some families have cos and sin in float32, and round what they rotated.
    """
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
    return torch.cat([part.to(x.dtype) for part in (*parts, rest)], dim=-1)
