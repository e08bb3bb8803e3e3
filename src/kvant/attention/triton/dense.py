"""Many queries of one head against contiguous decoded keys and values.

Hopper's bulk copies load tiles; 64 queries multiply with 64 keys at a time. Tiles that every query of
the program sees whole need no mask. Online softmax in base 2, as in `paged_attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tiles(state, q, k, v, kv_head, base, start, end, row_lo, row_hi, scale, cap,
           TILE: tl.constexpr, HEAD: tl.constexpr, MASKED: tl.constexpr,
           SOFTCAP: tl.constexpr):  # fmt: skip
    """Adds keys start .. end of a sequence to the running softmax. base: row of the sequence's first key."""
    acc, top, den = state
    for at in range(start, end, TILE):
        keys = k.load([base + at, kv_head, 0]).reshape(TILE, HEAD)
        x = tl.dot(q, keys.T)
        if SOFTCAP:
            # cap * tanh(y / cap) with tanh(z) = 1 - 2 / (exp(2 z) + 1)
            x = 1.0 - 2.0 / (tl.exp2(x * (scale * (2.0 / cap))) + 1.0)
            factor = cap * LOG2E
        else:
            factor = scale
        if MASKED:
            n = at + tl.arange(0, TILE)
            seen = (n[None, :] >= row_lo[:, None]) & (n[None, :] < row_hi[:, None])
            # LOWEST is set after the product: fused, `LOWEST * factor - top` would be the product's rounding
            # error, and 2 to its power infinite, in rows that have seen no key yet.
            y = tl.where(seen, x * factor, LOWEST)
            new_top = tl.maximum(top, tl.max(y, 1))
            p = tl.exp2(y - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(x, 1) * factor)
            p = tl.exp2(x * factor - new_top[:, None])
        fade = tl.exp2(top - new_top)
        den = den * fade + tl.sum(p, 1)
        values = v.load([base + at, kv_head, 0]).reshape(TILE, HEAD)
        acc = tl.dot(p.to(q.dtype), values, acc * fade[:, None])
        top = new_top
    return acc, top, den


@triton.jit(do_not_specialize=("first_seq", "size", "skipped", "window"))
def dense_attention(
    q_ptr, q_stride_token, q_stride_head, k, v, sinks, out, cu_seqlens_q, seqlens_kv,
    first_seq, size, skipped, softmax_scale, cap, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Program (row block, last first; query head; sequence, counted from first_seq).

    k, v: descriptors of [sequences * size, KV heads, HEAD], blocks [TILE, 1, HEAD]; each sequence has its
    keys from token `skipped` on. q: by its strides. out: [T, HEADS, HEAD].
    """
    head = tl.program_id(1)
    place = tl.program_id(2)
    first_token = tl.load(cu_seqlens_q + first_seq + place)
    num_queries = tl.load(cu_seqlens_q + first_seq + place + 1) - first_token
    length = tl.load(seqlens_kv + first_seq + place)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first >= num_queries:
        return
    last = tl.minimum(first + ROWS, num_queries) - 1
    offset = length - num_queries  # position of the first query
    r = first + tl.arange(0, ROWS)
    there = r < num_queries
    here = offset + r
    row_lo = here - window + 1 if WINDOW else 0 * here
    start = 0
    open_from = 0
    if WINDOW:
        start = tl.maximum(offset + first - window + 1, 0) // TILE * TILE
        open_from = tl.cdiv(tl.maximum(offset + last - window + 1, 0), TILE) * TILE
    if CAUSAL:
        row_hi = here + 1
        end = offset + last + 1
        open_to = offset + first + 1
    elif WINDOW:
        row_hi = tl.minimum(length, here + window)
        end = tl.minimum(length, offset + last + window)
        open_to = tl.minimum(length, offset + first + window)
    else:
        row_hi = length + 0 * here
        end = length
        open_to = length
    open_from = tl.minimum(open_from, tl.cdiv(end, TILE) * TILE)
    open_to = tl.maximum(open_to // TILE * TILE, open_from)

    c = tl.arange(0, HEAD)
    token = (first_token + r).to(tl.int64)
    at = token * q_stride_token + head * q_stride_head
    q = tl.load(q_ptr + at[:, None] + c[None, :], mask=there[:, None], other=0.0)
    acc = tl.zeros((ROWS, HEAD), tl.float32)
    if SINKS:
        top = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        den = tl.full((ROWS,), 1.0, tl.float32)
    else:
        top = tl.full((ROWS,), LOWEST, tl.float32)
        den = tl.zeros((ROWS,), tl.float32)
    scale = softmax_scale * LOG2E
    base = place * size - skipped
    kv_head = head // GROUP
    state = (acc, top, den)
    if WINDOW:
        state = _tiles(state, q, k, v, kv_head, base, start, open_from, row_lo, row_hi, scale, cap,
                       TILE, HEAD, True, SOFTCAP)  # fmt: skip
    state = _tiles(state, q, k, v, kv_head, base, open_from, open_to, row_lo, row_hi, scale, cap,
                   TILE, HEAD, False, SOFTCAP)  # fmt: skip
    state = _tiles(state, q, k, v, kv_head, base, open_to, end, row_lo, row_hi, scale, cap,
                   TILE, HEAD, True, SOFTCAP)  # fmt: skip
    acc, top, den = state
    o = (acc / den[:, None]).to(out.dtype.element_ty)
    to = (token * HEADS + head) * HEAD
    tl.store(out + to[:, None] + c[None, :], o, mask=there[:, None])
