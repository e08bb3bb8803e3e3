"""Rotary embedding of q and k, and storing of k and v, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.store import encode_rows


@triton.jit
def _rotated(
    x_ptr, at, token, there, cos, sin, positions, weight, eps,
    HEAD: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """Rows [.., HEAD] that begin at `at`, rotated; (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    HALF: tl.constexpr = HEAD // 2
    c = tl.arange(0, PAD)
    is_low = c < HALF
    partner = tl.where(is_low, c + HALF, c - HALF)
    mask = there[:, None] & (c < HEAD)[None, :]
    x = tl.load(x_ptr + at[:, None] + c[None, :], mask=mask, other=0.0)
    y = tl.load(x_ptr + at[:, None] + partner[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD + eps)[:, None]
        w = tl.load(weight + c, mask=c < HEAD, other=0.0).to(tl.float32)[None, :]
        x = ((x * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        w = tl.load(weight + partner, mask=c < HEAD, other=0.0).to(tl.float32)[None, :]
        y = ((y * scale).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
    place = token.to(tl.int64)
    if BY_POSITION:
        place = tl.load(positions + token, mask=there, other=0)
    angle = place[:, None] * HALF + tl.where(is_low, c, c - HALF)[None, :]
    a = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    return (x * a + tl.where(is_low[None, :], -y, y) * b).to(dtype)


@triton.jit(do_not_specialize=("num_tokens",))
def rotate_and_store(
    qkv, stride_token, num_tokens, cos, sin, positions, q_weight, k_weight, eps, q_out,
    k_codes, k_scales, k_outer, v_codes, v_scales, v_outer, slot_mapping, counts,
    MOST_K: tl.constexpr, MOST_V: tl.constexpr,
    Q_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, PAD: tl.constexpr,
    NORM: tl.constexpr, BY_POSITION: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
    K: tl.constexpr, OUTER_K: tl.constexpr, V: tl.constexpr, OUTER_V: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows of q, of K or of V; a row is one token and head.

    qkv: [T, (Q_HEADS + 2 HEADS) * HEAD] by its stride. cos, sin: [.., HEAD / 2], of the row's position
    or, without BY_POSITION, of the row's token. q_out: [T, Q_HEADS, HEAD]. The other arguments are
    those of `store_rows`.
    """
    block = tl.program_id(0)
    q_blocks = tl.cdiv(num_tokens * Q_HEADS, ROWS)
    kv_blocks = tl.cdiv(num_tokens * HEADS, ROWS)
    if block < q_blocks:
        r = block * ROWS + tl.arange(0, ROWS)
        token = r // Q_HEADS
        there = token < num_tokens
        at = token.to(tl.int64) * stride_token + r % Q_HEADS * HEAD
        x = _rotated(qkv, at, token, there, cos, sin, positions, q_weight, eps,
                     HEAD, PAD, NORM, BY_POSITION)  # fmt: skip
        c = tl.arange(0, PAD)
        tl.store(q_out + r.to(tl.int64)[:, None] * HEAD + c[None, :], x,
                 mask=there[:, None] & (c < HEAD)[None, :])  # fmt: skip
    else:
        is_k = block < q_blocks + kv_blocks
        r = (block - q_blocks - tl.where(is_k, 0, kv_blocks)) * ROWS + tl.arange(0, ROWS)
        token = r // HEADS
        head = r % HEADS
        slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
        there = slot >= 0
        row = slot * HEADS + head
        at = token.to(tl.int64) * stride_token + (Q_HEADS + head) * HEAD
        if is_k:
            x = _rotated(qkv, at, token, there, cos, sin, positions, k_weight, eps,
                         HEAD, PAD, NORM, BY_POSITION)  # fmt: skip
            encode_rows(x, row, head, there, k_codes, k_scales, k_outer, counts, MOST_K, K, OUTER_K,
                        HEAD, PAD, ROWS, PTX)  # fmt: skip
        else:
            c = tl.arange(0, PAD)
            x = tl.load(qkv + (at + HEADS * HEAD)[:, None] + c[None, :],
                        mask=there[:, None] & (c < HEAD)[None, :], other=0.0)  # fmt: skip
            v_counts = counts
            if MOST_V > 0:
                v_counts = counts + 1
            encode_rows(x, row, head, there, v_codes, v_scales, v_outer, v_counts, MOST_V, V, OUTER_V,
                        HEAD, PAD, ROWS, PTX)  # fmt: skip
