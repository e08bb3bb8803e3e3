"""Operations between two matrix products; here in plain torch.

Values round where transformers' modules round, so that both give the same logits up to the order of
sums.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.invariant.vectors import by_whole_vectors


class Kernels(Protocol):
    """T tokens, all tensors on one device. Weights of norms are [width]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, width], normalised."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of x and residual [T, width], normalised, and the sum itself. May reuse both."""
        ...

    def rotate(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [T, heads, head_dim] of qkv [T, (Hq + 2 Hkv) * head_dim], q and k rotated.

        cos, sin: [T, head_dim / 2] for halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
        q_weight, k_weight: [head_dim], of a norm of every head before the rotation, or None.
        May work in place.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gate_up [T, 2 * width]."""
        ...


class TorchKernels:
    """Any device, any dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotate(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(qkv.shape[0], num_q_heads + 2 * num_kv_heads, -1)
        q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_weight is not None and k_weight is not None:
            q, k = self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)
        return _rotated(q, cos, sin), _rotated(k, cos, sin), v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class WideTorchKernels(TorchKernels):
    """Norms of float64 in float64, which transformers' modules compute in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is not torch.float64:
            return super().rms_norm(x, weight, eps)
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class InvariantTorchKernels(TorchKernels):
    """The same on a CPU, where torch's SiLU depends on a number's position; the rest does not."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return by_whole_vectors(F.silu, gate) * up


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
