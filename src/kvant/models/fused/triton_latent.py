"""The norm of a latent and the rotations beside it, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _turn(at, cos, sin, mask, ROTARY: tl.constexpr, PAD: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Rotates ROTARY numbers of each row at `at` [rows, 1], in place. cos, sin: of the rows' token."""
    HALF: tl.constexpr = ROTARY // 2
    i = tl.arange(0, PAD)
    inside = mask & (i < HALF)[None, :]
    first = 2 * i if NEIGHBOURS else i
    second = first + 1 if NEIGHBOURS else i + HALF
    a = tl.load(at + first[None, :], mask=inside, other=0.0)
    b = tl.load(at + second[None, :], mask=inside, other=0.0)
    dtype: tl.constexpr = a.dtype
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    c = tl.load(cos + i, mask=i < HALF, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    tl.store(at + first[None, :], (a * c - b * s).to(dtype), mask=inside)
    tl.store(at + second[None, :], (b * c + a * s).to(dtype), mask=inside)


@triton.jit(do_not_specialize=("q_stride", "row_stride"))
def rotate_latent(
    q, q_stride, row, row_stride, weight, eps, cos, sin,
    HEADS: tl.constexpr, HEAD: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr,
    PAD_L: tl.constexpr, PAD: tl.constexpr, NEIGHBOURS: tl.constexpr, AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program (token, block of AT_ONCE heads), in place; the last block is the stored row.

    q: [T, HEADS, HEAD], whose last ROTARY numbers are rotated. row: [T, LATENT + ROTARY]. q_stride,
    row_stride: numbers between two tokens. weight: [LATENT]. cos, sin: [T, ROTARY / 2].
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    cos += token * (ROTARY // 2)
    sin += token * (ROTARY // 2)
    if tl.program_id(1) == tl.num_programs(1) - 1:
        at = row + token * row_stride
        c = tl.arange(0, PAD_L)
        mask = c < LATENT
        raw = tl.load(at + c, mask=mask, other=0.0)
        x = raw.to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps)
        y = y.to(raw.dtype).to(tl.float32)
        y = y * tl.load(weight + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(at + c, y.to(raw.dtype), mask=mask)
        here = at + LATENT + tl.arange(0, 1)[:, None]
        _turn(here, cos, sin, tl.full((1, 1), True, tl.int1), ROTARY, PAD, NEIGHBOURS)
    else:
        head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        tails = q + token * q_stride + head[:, None] * HEAD + (HEAD - ROTARY)
        _turn(tails, cos, sin, (head < HEADS)[:, None], ROTARY, PAD, NEIGHBOURS)
