"""Rotates q and k, and stores k and v, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.attention.triton.store import encode_rows

NO_NORM, ROUNDED, WIDE, ONE = (tl.constexpr(i) for i in range(4))


@triton.jit
def _weighted(x, scale, w, NORM: tl.constexpr, dtype: tl.constexpr):
    """Rows x, float32, normalised with their scales and weights w [columns]; rounds where modules round."""
    x *= scale
    if NORM == ROUNDED:
        x = x.to(dtype).to(tl.float32)
    w = w.to(tl.float32)[None, :]
    if NORM == ONE:
        w += 1.0
    return (x * w).to(dtype).to(tl.float32)


@triton.jit
def _rotated(
    x_ptr, at, token, there, cos, sin, positions, weight, eps,
    HEAD: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr,
    NEIGHBOURS: tl.constexpr, BY_POSITION: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Loads rows [.., HEAD] from `at`, normalises them, and rotates pairs (a, b) of the first ROTARY numbers.

    (a, b) -> (a cos - b sin, b cos + a sin). WAIT: waits for the kernel before, which writes the rows, once
    weights and angles are read.
    """
    HALF: tl.constexpr = ROTARY // 2
    c = tl.arange(0, PAD)
    turns = c < ROTARY
    if NEIGHBOURS:
        is_first = c % 2 == 0
        partner = tl.where(turns, c ^ 1, c)
        angle = c // 2
    else:
        is_first = c < HALF
        partner = tl.where(turns, tl.where(is_first, c + HALF, c - HALF), c)
        angle = tl.where(is_first, c, c - HALF)
    if NORM != NO_NORM:
        w = tl.load(weight + c, mask=c < HEAD, other=0.0)
        partner_w = tl.load(weight + partner, mask=c < HEAD, other=0.0)
    if WAIT and not BY_POSITION:  # the step's own angles may have been computed just before
        gdc_wait()
    if ROTARY > 0:
        place = token.to(tl.int64)
        if BY_POSITION:
            place = tl.load(positions + token, mask=there, other=0)
        from_table = there[:, None] & turns[None, :]
        angles = place[:, None] * HALF + angle[None, :]
        a = tl.load(cos + angles, mask=from_table, other=1.0).to(tl.float32)
        b = tl.load(sin + angles, mask=from_table, other=0.0).to(tl.float32)
    if WAIT and BY_POSITION:
        gdc_wait()
    mask = there[:, None] & (c < HEAD)[None, :]
    x = tl.load(x_ptr + at[:, None] + c[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    scale = x  # for a norm alone
    if ROTARY > 0:
        y = tl.load(x_ptr + at[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM != NO_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD + eps)[:, None]
        x = _weighted(x, scale, w, NORM, dtype)
    if ROTARY > 0:
        if NORM != NO_NORM:
            y = _weighted(y, scale, partner_w, NORM, dtype)
        x = x * a + tl.where(is_first[None, :], -y, y) * b
    return x.to(dtype)


@triton.jit
def _rotated_halves(
    x_ptr, at, token, there, cos, sin, positions, weight, eps,
    HEAD: tl.constexpr, NORM: tl.constexpr, BY_POSITION: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Implements `_rotated` for pairs (c, c + HEAD / 2); returns both halves of the rows."""
    HALF: tl.constexpr = HEAD // 2
    c = tl.arange(0, HALF)
    if NORM != NO_NORM:
        w = tl.load(weight + c)
        further_w = tl.load(weight + HALF + c)
    if WAIT and not BY_POSITION:  # as in `_rotated`
        gdc_wait()
    place = token.to(tl.int64)
    if BY_POSITION:
        place = tl.load(positions + token, mask=there, other=0)
    mask = there[:, None]
    angles = place[:, None] * HALF + c[None, :]
    a = tl.load(cos + angles, mask=mask, other=1.0).to(tl.float32)
    b = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
    if WAIT and BY_POSITION:
        gdc_wait()
    x = tl.load(x_ptr + at[:, None] + c[None, :], mask=mask, other=0.0)
    y = tl.load(x_ptr + at[:, None] + HALF + c[None, :], mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    if NORM != NO_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD + eps)[:, None]
        x = _weighted(x, scale, w, NORM, dtype)
        y = _weighted(y, scale, further_w, NORM, dtype)
    return (x * a - y * b).to(dtype), (y * a + x * b).to(dtype)


@triton.jit(do_not_specialize=("num_tokens", "page_units"))
def rotate_and_store(
    qkv, stride_token, num_tokens, cos, sin, positions, q_weight, k_weight, eps, q_out,
    k_codes, k_scales, k_outer, v_codes, v_scales, v_outer, page_units, slot_mapping,
    counts, MOST_K: tl.constexpr, MOST_V: tl.constexpr,
    Q_HEADS: tl.constexpr, Q_STEP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD: tl.constexpr,
    PAD: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, NEIGHBOURS: tl.constexpr, BY_POSITION: tl.constexpr,
    HALVES: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
    K: tl.constexpr, OUTER_K: tl.constexpr, V: tl.constexpr, OUTER_V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows of q, of K or of V; a row is one token and head.

    qkv: [T, (Q_STEP * Q_HEADS + 2 HEADS) * HEAD] by its stride; every Q_STEP-th head is one of q. cos, sin:
    [.., ROTARY / 2], indexed by position if BY_POSITION, else by token. q_out: [T, Q_HEADS, HEAD]. HALVES:
    whole heads turn, as `_rotated_halves` does. Other arguments: as in `store_rows`. AHEAD: starts while the
    previous kernel runs.
    """
    if AHEAD:
        gdc_launch_dependents()
    block = tl.program_id(0)
    q_blocks = tl.cdiv(num_tokens * Q_HEADS, ROWS)
    kv_blocks = tl.cdiv(num_tokens * HEADS, ROWS)
    if block < q_blocks:
        r = block * ROWS + tl.arange(0, ROWS)
        token = r // Q_HEADS
        there = token < num_tokens
        at = token.to(tl.int64) * stride_token + r % Q_HEADS * (Q_STEP * HEAD)
        if HALVES:
            first, second = _rotated_halves(qkv, at, token, there, cos, sin, positions, q_weight, eps,
                                            HEAD, NORM, BY_POSITION, AHEAD)  # fmt: skip
            to = q_out + r.to(tl.int64)[:, None] * HEAD + tl.arange(0, HEAD // 2)[None, :]
            tl.store(to, first, mask=there[:, None])
            tl.store(to + HEAD // 2, second, mask=there[:, None])
        else:
            x = _rotated(qkv, at, token, there, cos, sin, positions, q_weight, eps,
                         HEAD, PAD, NORM, ROTARY, NEIGHBOURS, BY_POSITION, AHEAD)  # fmt: skip
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
        page = slot // PAGE
        small = (slot % PAGE).to(tl.int32) * HEADS + head
        at = token.to(tl.int64) * stride_token + (Q_HEADS * Q_STEP + head) * HEAD
        if is_k:
            if HALVES:
                first, second = _rotated_halves(qkv, at, token, there, cos, sin, positions, k_weight,
                                                eps, HEAD, NORM, BY_POSITION, AHEAD)  # fmt: skip
                x = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (ROWS, HEAD))
            else:
                x = _rotated(qkv, at, token, there, cos, sin, positions, k_weight, eps,
                             HEAD, PAD, NORM, ROTARY, NEIGHBOURS, BY_POSITION, AHEAD)  # fmt: skip
            encode_rows(x, page, small, head, there, k_codes, k_scales, page_units, k_outer, counts,
                        MOST_K, K, OUTER_K, HEAD, PAD, ROWS, PTX)  # fmt: skip
        else:
            if AHEAD:
                gdc_wait()
            c = tl.arange(0, PAD)
            x = tl.load(qkv + (at + HEADS * HEAD)[:, None] + c[None, :],
                        mask=there[:, None] & (c < HEAD)[None, :], other=0.0)  # fmt: skip
            v_counts = counts
            if MOST_V > 0:
                v_counts = counts + 1
            encode_rows(x, page, small, head, there, v_codes, v_scales, page_units, v_outer, v_counts,
                        MOST_V, V, OUTER_V, HEAD, PAD, ROWS, PTX)  # fmt: skip
