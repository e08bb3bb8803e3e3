"""Joins the partial outputs of items that share a query row."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.attention.triton.paged import NARROW, with_narrow
from kvant.attention.triton.rotation import hadamard
from kvant.attention.triton.workmap import find_token, listed, tiles_per_split

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=("num_seqs", "window", "target", "least", "per_program"))
def combine(
    partial, partial_lse, sinks, out, narrow, narrow_lse, cu_seqlens_q, seqlens_kv, tokens,
    num_seqs, window, target, least, per_program,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_V: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    DIRECT: tl.constexpr, FIXED: tl.constexpr, SEARCH: tl.constexpr, LISTED: tl.constexpr,
    ROTATION: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, LANES: tl.constexpr,
    FORM: tl.constexpr = 0,
):  # fmt: skip
    """Program: joins the items of per_program query heads of a token, which it finds once for all heads.

    partial, partial_lse, out, sinks, narrow, narrow_lse, FORM: as in `paged_attention`. Items are joined
    AT_ONCE at a time, in order.
    DIRECT: rows of a single item were already written. SEARCH: whether the items were made with a search.
    LISTED: tokens is from `list_items`. ROTATION: length of the rotation's blocks, 0 for none. Tokens of no
    sequence get zeros. AHEAD, EARLY, LANES: as in `paged_attention`.
    """
    if AHEAD:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    first_head = tl.program_id(0) * per_program % (HEADS * GROUP)
    token = tl.program_id(0) * per_program // (HEADS * GROUP)
    if LISTED:
        seq, first_item, splits = listed(tokens, token)
    else:
        per_split = least
        if not FIXED:
            per_split = tiles_per_split(cu_seqlens_q, seqlens_kv, num_seqs, window, target, least,
                                        GROUP, ROWS, TILE, CAUSAL, WINDOW, SEARCH, LANES)  # fmt: skip
        seq, first_item, splits = find_token(token, per_split, cu_seqlens_q, seqlens_kv, num_seqs, window,
                                             GROUP, ROWS, TILE, CAUSAL, WINDOW and not FIXED,
                                             LANES)  # fmt: skip
    c = tl.arange(0, PAD)
    if AHEAD and EARLY:
        gdc_wait()
    first_out = (token.to(tl.int64) * (HEADS * GROUP) + first_head) * HEAD_V
    if seq < 0:
        for i in range(per_program):
            at = first_out + i * HEAD_V + c
            tl.store(out + at, tl.zeros((PAD,), out.dtype.element_ty), mask=c < HEAD_V)
        return
    if DIRECT and splits == 1:
        return
    place = token - tl.load(cu_seqlens_q + seq)
    for i in range(per_program):
        query_head = first_head + i
        head = query_head // GROUP
        row = place * GROUP + query_head % GROUP
        first_of_row = first_item + row // ROWS * splits
        row = row % ROWS
        s = tl.arange(0, AT_ONCE)
        if SINKS:
            top = tl.load(sinks + query_head).to(tl.float32) * LOG2E
            den = 1.0
        else:
            top = float("-inf")
            den = 0.0
        o = tl.zeros((PAD,), tl.float32)
        for first in range(0, splits, AT_ONCE):
            there = first + s < splits
            slot = ((first_of_row + first + s).to(tl.int64) * HEADS + head) * ROWS + row
            lse = tl.load(partial_lse + slot, mask=there, other=float("-inf"))
            part = tl.load(partial + slot[:, None] * HEAD_V + c[None, :],
                           mask=there[:, None] & (c < HEAD_V)[None, :], other=0.0)  # fmt: skip
            higher = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(lse - base)
            fade = tl.exp2(top - base)
            o = o * fade + tl.sum(part * weight[:, None], 0)
            den = den * fade + tl.sum(weight, 0)
            top = higher
        o = tl.where(den > 0, o / den, 0.0 * den)
        if ROTATION > 0:
            o = tl.reshape(hadamard(tl.reshape(o, (1, PAD)), 1, PAD, ROTATION), (PAD,)) / ROTATION
        if FORM > 0:
            lse = tl.where(den > 0, top + tl.log2(den), top + den)
            at = token.to(tl.int64) * (HEADS * GROUP) + query_head
            if FORM == NARROW:
                tl.store(narrow_lse + at, lse)
            else:
                one = tl.zeros((1,), tl.float32)
                o = tl.reshape(
                    with_narrow(
                        o[None, :], one + lse, narrow, narrow_lse, at + one.to(tl.int64), one == 0.0,
                        (c < HEAD_V)[None, :], c, HEAD_V,
                    ), (PAD,),
                )  # fmt: skip
        tl.store(out + first_out + i * HEAD_V + c, o.to(out.dtype.element_ty), mask=c < HEAD_V)
