"""The attention kernel for latents (MLA): a block of query rows against a range of one sequence's rows.

Rows are (query, head) pairs of one sequence. All heads share a stored row: its LATENT first numbers and
its ROTARY last ones are the key, and the latent is also the value. So a tile is loaded and decoded once for
both products. The softmax, the operands and their scales are those of `paged`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.attention.triton.paged import (
    HEADROOM,
    LOG2E,
    LOWEST,
    SMALL,
    elements,
    operand,
    page_ids,
    places,
    row_at,
)
from kvant.attention.triton.words import in_order
from kvant.attention.triton.workmap import find_item, listed, tiles_per_split


@triton.jit
def _scores(q, keys, x):
    """Returns x [ROWS, TILE] plus the products of query parts [ROWS, words] and keys [TILE, words]."""
    for e in tl.static_range(len(keys)):
        x = tl.dot(q[e], tl.trans(keys[e]), x, input_precision="ieee")
    return x


@triton.jit
def _tile(
    state, q_latent, q_rotary, q_sum, factor, at, end, row_hi,
    codes, scales, page_units, pages,
    ROWS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, PAD_L: tl.constexpr, PAD_R: tl.constexpr,
    MASKED: tl.constexpr, FULL: tl.constexpr, FIXED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Adds one tile of rows to the state, as in `paged`."""
    acc, top, den, zeros, reference, page = state
    _, offset = places(at, TILE, PAGE)
    pos = at + tl.arange(0, TILE)
    if MASKED:
        there = pos < end
    else:
        there = tl.full((TILE,), True, tl.int1)
    WORDS_L: tl.constexpr = LATENT // K.elements
    WORDS_R: tl.constexpr = ROTARY // K.elements
    UNITS: tl.constexpr = (LATENT + ROTARY) * K.bits // K.word_bits
    row = row_at(codes, page, offset, page_units, UNITS)[:, None]
    jl = tl.arange(0, PAD_L)
    jr = tl.arange(0, PAD_R)
    latent = K.load(row, jl, there[:, None] & (jl < WORDS_L)[None, :], None,
                    MASKED or PAD_L != WORDS_L, PTX)  # fmt: skip
    rotary = K.load(row, WORDS_L + jr, there[:, None] & (jr < WORDS_R)[None, :], None,
                    MASKED or PAD_R != WORDS_R, PTX)  # fmt: skip
    next_page = page_ids(pages, at + TILE, end, TILE, PAGE)

    latents = elements(latent, 0.0, K, FULL, PTX)
    x = tl.zeros((ROWS, TILE), tl.float32)
    x = _scores(q_rotary, elements(rotary, 0.0, K, FULL, PTX), x)
    x = _scores(q_latent, latents, x)
    if K.per_row:
        scale, _ = K.row_scale(row_at(scales, page, offset, page_units, 1), there)
        if K.bias > 0:
            x -= q_sum[:, None] * K.bias
        x *= scale[None, :]
    if MASKED:
        ok = there[None, :] & (pos[None, :] < row_hi[:, None])
        x = tl.where(ok, x, LOWEST)
    new_top = tl.maximum(top, tl.max(x, 1))
    p = tl.exp2(x * factor[:, None] - (new_top * factor)[:, None])
    if MASKED:
        p = tl.where(ok, p, 0.0)
    fade = tl.exp2((top - new_top) * factor)
    den = den * fade + tl.sum(p, 1)
    if K.per_row:
        if FIXED:
            if MASKED:
                seen = tl.max(tl.where(ok, scale[None, :], 0.0), 1)
            else:
                seen = tl.max(scale, 0)
            new_reference = tl.maximum(reference, seen)
            p = p * scale[None, :] * (1.0 / new_reference * HEADROOM)[:, None]
        else:
            new_reference = tl.maximum(reference, tl.max(scale, 0))
            p *= (scale * (HEADROOM / new_reference))[None, :]
        ratio = reference / new_reference
        if FIXED:
            ratio = tl.where(new_reference > reference, ratio, 1.0)
        fade *= ratio
        reference = new_reference
    p = operand(p, K, FULL)
    if K.bias > 0:
        zeros = zeros * fade + tl.sum(p.to(tl.float32), 1) * K.bias
    f = fade[:, None]
    sums = ()
    for e in tl.static_range(len(latents)):
        sums = sums + (tl.dot(p, latents[e], acc[e] * f, input_precision="ieee"),)
    return sums, new_top, den, zeros, reference, next_page


@triton.jit
def _largest(q_row, there, first, E: tl.constexpr, COUNT: tl.constexpr, PAD: tl.constexpr):
    """Returns the largest magnitude of COUNT numbers from `first` on: float32 [ROWS]."""
    c = tl.arange(0, E * PAD)
    raw = tl.load(q_row[:, None] + (first + c)[None, :],
                  mask=there[:, None] & (c < COUNT)[None, :], other=0.0)  # fmt: skip
    return tl.max(tl.abs(raw.to(tl.float32)), 1)


@triton.jit
def _query_parts(
    q_row, there, by, first, K: tl.constexpr, COUNT: tl.constexpr, PAD: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Returns operands of COUNT numbers from `first` on, times by [ROWS]: one for each element of a word."""
    ELEMENTS: tl.constexpr = K.elements
    j = tl.arange(0, PAD)
    parts = ()
    for e in tl.static_range(ELEMENTS):
        c = ELEMENTS * j + e
        raw = tl.load(q_row[:, None] + (first + c)[None, :],
                      mask=there[:, None] & (c < COUNT)[None, :], other=0.0)  # fmt: skip
        parts = parts + (operand(raw.to(tl.float32) * by[:, None], K, FULL),)
    return parts


_VARYING = ("page_units", "max_pages", "num_seqs", "target", "least")


@triton.jit(do_not_specialize=_VARYING)
def latent_attention(
    q_ptr, q_stride_token, q_stride_head, codes, scales, page_units, outer,
    out, partial, partial_lse,
    cu_seqlens_q, seqlens_kv, items, page_table, max_pages, num_seqs,
    softmax_scale, target, least,
    GROUP: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    K: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr,
    PAD_L: tl.constexpr, PAD_R: tl.constexpr, OUTER: tl.constexpr,
    FULL: tl.constexpr, DIRECT: tl.constexpr, FIXED: tl.constexpr, LISTED: tl.constexpr,
    PTX: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program: one item, causal. Writes `out` if DIRECT and its sequence is one item long, else parts.

    q: [T, GROUP, LATENT + ROTARY] by its strides. out: [T, GROUP, LATENT]. partial: [items, 1, ROWS, LATENT].
    Other arguments: as in `paged_attention`.
    """
    if AHEAD:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    ELEMENTS: tl.constexpr = K.elements
    item = tl.program_id(0)
    per_split = least
    if LISTED:
        seq, first_item, splits = listed(items, item)
    else:
        if not FIXED:
            per_split = tiles_per_split(cu_seqlens_q, seqlens_kv, num_seqs, 0, target, least,
                                        GROUP, ROWS, TILE, True, False, True, LANES)  # fmt: skip
        seq, first_item, splits = find_item(item, per_split, cu_seqlens_q, seqlens_kv, num_seqs, 0,
                                            GROUP, ROWS, TILE, True, False, LANES)  # fmt: skip
    if seq < 0:
        if AHEAD and EARLY:
            gdc_wait()
        return
    block = (item - first_item) // splits
    split = (item - first_item) % splits
    first_token = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - first_token
    length = tl.load(seqlens_kv + seq)

    r = block * ROWS + tl.arange(0, ROWS)
    query = r // GROUP
    there = query < num_queries
    query_head = r % GROUP
    row_hi = tl.where(there, length - num_queries + query + 1, 0)
    last_query = tl.minimum((block * ROWS + ROWS - 1) // GROUP, num_queries - 1)
    end = length - num_queries + last_query + 1
    whole = length - num_queries + block * ROWS // GROUP + 1  # tiles up to here need no mask
    if FIXED:
        begin = split * per_split * TILE
        end = tl.minimum(end, (split + 1) * per_split * TILE)
    else:
        step = tl.cdiv(tl.cdiv(tl.maximum(end, 0), splits), TILE) * TILE
        begin = split * step
        end = tl.minimum(end, begin + step)
    if AHEAD and EARLY:
        gdc_wait()

    token = (first_token + query).to(tl.int64)
    q_row = q_ptr + token * q_stride_token + query_head * q_stride_head
    sign = tl.where(softmax_scale < 0, -1.0, 1.0)
    norm = tl.full((ROWS,), 1.0, tl.float32)
    if K.operand == tl.float16 and not FULL:
        norm = tl.maximum(_largest(q_row, there, 0, ELEMENTS, LATENT, PAD_L),
                          _largest(q_row, there, LATENT, ELEMENTS, ROTARY, PAD_R))  # fmt: skip
        norm = tl.maximum(norm, 1.0e-30)
    q_latent = _query_parts(q_row, there, sign / norm, 0, K, LATENT, PAD_L, FULL)
    q_rotary = _query_parts(q_row, there, sign / norm, LATENT, K, ROTARY, PAD_R, FULL)
    q_sum = tl.zeros((ROWS,), tl.float32)
    if K.bias > 0:
        for e in tl.static_range(ELEMENTS):
            q_sum += tl.sum(q_latent[e].to(tl.float32), 1)
            q_sum += tl.sum(q_rotary[e].to(tl.float32), 1)
        q_sum = q_sum / K.factor
    factor = norm * (tl.abs(softmax_scale) * (K.factor * LOG2E))
    if OUTER > 0:
        factor *= tl.load(outer)

    z = tl.zeros((ROWS, PAD_L), tl.float32)
    acc = ()
    for _ in tl.static_range(ELEMENTS):
        acc = acc + (z,)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    den = tl.zeros((ROWS,), tl.float32)
    zeros = tl.zeros((ROWS,), tl.float32)
    reference = SMALL
    if FIXED:
        reference = tl.full((ROWS,), SMALL, tl.float32)
    pages = page_table + seq.to(tl.int64) * max_pages
    state = (acc, top, den, zeros, reference, page_ids(pages, begin, end, TILE, PAGE))
    masked_from = begin
    if not FIXED:  # as in `paged_attention`
        masked_from = begin + tl.maximum(tl.minimum(whole, end) - begin, 0) // TILE * TILE
        for at in range(begin, masked_from, TILE):
            state = _tile(
                state, q_latent, q_rotary, q_sum, factor, at, end, row_hi,
                codes, scales, page_units, pages, ROWS, TILE, PAGE, K, LATENT, ROTARY, PAD_L, PAD_R,
                False, FULL, FIXED, PTX,
            )  # fmt: skip
    for at in tl.range(masked_from, end, TILE, num_stages=1):
        state = _tile(
            state, q_latent, q_rotary, q_sum, factor, at, end, row_hi,
            codes, scales, page_units, pages, ROWS, TILE, PAGE, K, LATENT, ROTARY, PAD_L, PAD_R,
            True, FULL, FIXED, PTX,
        )  # fmt: skip
    acc, top, den, zeros, reference, _ = state
    level = top * factor
    value = tl.where(den > 0, 1.0 / den, 0.0 * den)  # NaN stays NaN
    if K.per_row:
        value *= reference / HEADROOM
    if OUTER > 0:
        value *= tl.load(outer)
    parts = ()
    for e in tl.static_range(ELEMENTS):
        part = acc[e] * (value * K.factor)[:, None]
        if K.bias > 0:
            part -= (zeros * value)[:, None]
        parts = parts + (part,)
    o = in_order(parts, ROWS, PAD_L)
    c = tl.arange(0, ELEMENTS * PAD_L)
    mask = there[:, None] & (c < LATENT)[None, :]
    if DIRECT and splits == 1:
        at_row = out + (token * GROUP + query_head) * LATENT
        tl.store(at_row[:, None] + c[None, :], o.to(out.dtype.element_ty), mask=mask)
    else:
        slot = item.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(partial + slot[:, None] * LATENT + c[None, :], o, mask=mask)
        lse = tl.where(den > 0, level + tl.log2(den), float("-inf"))
        lse = tl.where(den != den, den, lse)
        tl.store(partial_lse + slot, lse, mask=there)
