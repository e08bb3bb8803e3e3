"""`Kernels` for GPUs: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


class TritonKernels:
    """float16, bfloat16 and float32 on a GPU."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, width = x.shape
        out = torch.empty_like(x)
        _norm[(tokens,)](
            x, x, out, weight, eps, WIDTH=width, PAD=triton.next_power_of_2(width), ADD=False,
            num_warps=_warps(width),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        tokens, width = x.shape
        _norm[(tokens,)](
            x, residual, x, weight, eps, WIDTH=width, PAD=triton.next_power_of_2(width), ADD=True,
            num_warps=_warps(width),
        )  # fmt: skip
        return x, residual

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
        tokens = qkv.shape[0]
        heads = qkv.view(tokens, num_q_heads + 2 * num_kv_heads, -1)
        half = heads.shape[-1] // 2
        rotated = num_q_heads + num_kv_heads
        at_once = 4
        _rotate[(tokens, triton.cdiv(rotated, at_once))](
            qkv, qkv.stride(0), cos, sin, q_weight, k_weight, eps,
            Q_HEADS=num_q_heads, HEADS=rotated, HALF=half, PAD=triton.next_power_of_2(half),
            NORM=q_weight is not None, AT_ONCE=at_once, num_warps=1,
        )  # fmt: skip
        q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
        return q, k, v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, both = gate_up.shape
        width = both // 2
        out = gate_up.new_empty(tokens, width)
        block = 1024
        _silu_mul[(tokens, triton.cdiv(width, block))](
            gate_up, out, WIDTH=width, BLOCK=block, num_warps=4
        )
        return out


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


@triton.jit
def _norm(x, residual, out, weight, eps,
          WIDTH: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * WIDTH
    c = tl.arange(0, PAD)
    mask = c < WIDTH
    value = tl.load(x + row + c, mask=mask, other=0.0)
    dtype = value.dtype
    if ADD:
        value = (
            value.to(tl.float32) + tl.load(residual + row + c, mask=mask, other=0.0).to(tl.float32)
        ).to(dtype)
        tl.store(residual + row + c, value, mask=mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    w = tl.load(weight + c, mask=mask, other=0.0)
    normed = (wide * scale).to(dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row + c, normed.to(dtype), mask=mask)


@triton.jit
def _rotate(qkv, stride, cos, sin, q_weight, k_weight, eps,
            Q_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PAD: tl.constexpr,
            NORM: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    c = tl.arange(0, PAD)
    inside = c < HALF
    mask = (head < HEADS)[:, None] & inside[None, :]
    low = qkv + token * stride + head[:, None] * (2 * HALF) + c[None, :]
    a = tl.load(low, mask=mask, other=0.0)
    b = tl.load(low + HALF, mask=mask, other=0.0)
    dtype = a.dtype
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)
        is_q = (head < Q_HEADS)[:, None]
        wa = tl.where(is_q, tl.load(q_weight + c, mask=inside, other=0.0)[None, :],
                      tl.load(k_weight + c, mask=inside, other=0.0)[None, :]).to(tl.float32)  # fmt: skip
        wb = tl.where(is_q, tl.load(q_weight + HALF + c, mask=inside, other=0.0)[None, :],
                      tl.load(k_weight + HALF + c, mask=inside, other=0.0)[None, :]).to(tl.float32)  # fmt: skip
        a = ((a * scale[:, None]).to(dtype).to(tl.float32) * wa).to(dtype).to(tl.float32)
        b = ((b * scale[:, None]).to(dtype).to(tl.float32) * wb).to(dtype).to(tl.float32)
    x = tl.load(cos + token * HALF + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = tl.load(sin + token * HALF + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(low, (a * x - b * y).to(dtype), mask=mask)
    tl.store(low + HALF, (b * x + a * y).to(dtype), mask=mask)


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = c < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + c, mask=mask, other=0.0)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + c, mask=mask, other=0.0)
    dtype = gate.dtype
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
    tl.store(out + token * WIDTH + c, (silu * up.to(tl.float32)).to(dtype), mask=mask)
