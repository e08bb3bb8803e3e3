"""One launch for layers with wide rows, for steps in which every sequence is one block of rows.

Programs read the narrow form, and shorter ones behind them the wide form. The last program of a sequence, or
`combine_both`, joins the parts of both forms.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.attention.triton.paged import LOG2E, NARROW, WIDE, attend_item, clear, sum_of_parts
from kvant.attention.triton.rotation import hadamard
from kvant.attention.triton.workmap import find_item, find_token, listed, tiles_per_split


@triton.jit
def _join_both(
    partial, partial_lse, sinks, out, first, splits, first_wide, parts, token, r, there, head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_V: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, VALID: tl.constexpr, AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr, ROTATED: tl.constexpr, WIDE_ROTATED: tl.constexpr,
):  # fmt: skip
    """Writes rows r [VALID] of a block where `there`: joins `splits` narrow parts and `parts` wide ones.

    first, first_wide: slots of the first narrow and wide part. token: the sequence's first token. Wide parts
    are rotated only if narrow ones are.
    """
    ROTATION: tl.constexpr = HEAD_V & -HEAD_V
    c = tl.arange(0, PAD)
    query_head = head * GROUP + r % GROUP
    lowest = tl.full((VALID,), float("-inf"), tl.float32)
    none = tl.zeros((VALID,), tl.float32)
    o, top, den = sum_of_parts(
        partial, partial_lse, first, splits, head, r, there, lowest, none,
        HEADS, HEAD_V, PAD, ROWS, VALID, AT_ONCE,
    )  # fmt: skip
    if ROTATED and not WIDE_ROTATED:
        o = hadamard(o, VALID, PAD, ROTATION) / ROTATION
    if SINKS:
        level = tl.load(sinks + query_head, mask=there, other=0.0).to(tl.float32) * LOG2E
        weight = tl.full((VALID,), 1.0, tl.float32)
    else:
        level = lowest
        weight = none
    wide, level, weight = sum_of_parts(
        partial, partial_lse, first_wide, parts, head, r, there, level, weight,
        HEADS, HEAD_V, PAD, ROWS, VALID, AT_ONCE,
    )  # fmt: skip
    higher = tl.maximum(top, level)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    a = tl.exp2(top - base)
    b = tl.exp2(level - base)
    den = den * a + weight * b
    o = o * a[:, None] + wide * b[:, None]
    if WIDE_ROTATED:
        o = hadamard(o, VALID, PAD, ROTATION) / ROTATION
    o = tl.where((den > 0)[:, None], o / den[:, None], (0.0 * den)[:, None])
    row = (token + r // GROUP).to(tl.int64) * (HEADS * GROUP) + query_head
    mask = there[:, None] & (c < HEAD_V)[None, :]
    tl.store(out + row[:, None] * HEAD_V + c[None, :], o.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(
    partial, partial_lse, slot, o, lse, there, COLUMNS: tl.constexpr, HEAD_V: tl.constexpr
):
    c = tl.arange(0, COLUMNS)
    mask = there[:, None] & (c < HEAD_V)[None, :]
    tl.store(partial + slot[:, None] * HEAD_V + c[None, :], o, mask=mask)
    tl.store(partial_lse + slot, lse, mask=there)


# As in `paged`: numbers that change from step to step.
_VARYING = (
    "page_units", "max_pages", "wide_units", "wide_max_pages", "num_seqs", "target", "least", "num_tokens",
    "sink", "recent",
)  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def both_attention(
    q_ptr, q_stride_token, q_stride_head, k_codes, k_scales, v_codes, v_scales, shifts, page_units,
    k_outer, v_outer, page_table, max_pages,
    wide_q_ptr, wide_q_stride_token, wide_q_stride_head,
    wide_k_codes, wide_k_scales, wide_v_codes, wide_v_scales, wide_units, wide_page_table, wide_max_pages,
    sinks, out, partial, partial_lse, cu_seqlens_q, seqlens_kv, items, num_seqs, arrived, num_tokens,
    softmax_scale, cap, target, least, sink, recent,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HEAD_K: tl.constexpr, HEAD_V: tl.constexpr,
    K: tl.constexpr, PAD_K: tl.constexpr, V: tl.constexpr, PAD_V: tl.constexpr,
    K_OUTER: tl.constexpr, V_OUTER: tl.constexpr,
    WIDE_TILE: tl.constexpr, WIDE_K: tl.constexpr, WIDE_PAD_K: tl.constexpr,
    WIDE_V: tl.constexpr, WIDE_PAD_V: tl.constexpr,
    WIDE_K_OUTER: tl.constexpr, WIDE_V_OUTER: tl.constexpr, APART: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FULL: tl.constexpr, LISTED: tl.constexpr,
    PTX: tl.constexpr, JOIN: tl.constexpr, AT_ONCE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    LANES: tl.constexpr, WIDE_STAGES: tl.constexpr,
):  # fmt: skip
    """Program item * HEADS + KV head: its share of the narrow rows of a sequence, or of the wide ones.

    APART: number of programs for wide rows per sequence and KV head. They come last: they are short, and fill
    the places that the others leave. WIDE_STAGES: of their loop.
    Arguments without WIDE: as in `paged_attention`, whose NARROW and WIDE forms this reads. Queries are
    causal. partial and partial_lse have slots of the narrow parts of all items first, then of the wide ones.
    """
    if AHEAD:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    COLUMNS: tl.constexpr = V.elements * PAD_V
    WIDE_COLUMNS: tl.constexpr = WIDE_V.elements * WIDE_PAD_V
    head = tl.program_id(0) % HEADS
    program = tl.program_id(0) // HEADS
    num_items = tl.num_programs(0) // HEADS - num_seqs * APART
    extra = program - num_items  # negative for a program that reads narrow rows
    per_split = least
    if not LISTED:
        per_split = tiles_per_split(cu_seqlens_q, seqlens_kv, num_seqs, 0, target, least,
                                    GROUP, ROWS, TILE, True, False, True, LANES)  # fmt: skip
    if extra < 0:
        if LISTED:
            seq, first, splits = listed(items, program)
        else:
            seq, first, splits = find_item(program, per_split, cu_seqlens_q, seqlens_kv, num_seqs, 0,
                                           GROUP, ROWS, TILE, True, False, LANES)  # fmt: skip
    else:
        mine = extra // APART
        if LISTED:
            seq = mine
            first = 0 * program
            splits = 1 + first
        else:
            token = tl.load(cu_seqlens_q + mine)
            seq, first, splits = find_token(token, per_split, cu_seqlens_q, seqlens_kv, num_seqs, 0,
                                            GROUP, ROWS, TILE, True, False, LANES)  # fmt: skip
            seq = tl.where(seq == mine, seq, -1)  # -1 if this sequence has no queries
    if AHEAD and EARLY:
        gdc_wait()
    if JOIN > 0:  # tokens of no sequence get zeros
        clear(out, tl.load(cu_seqlens_q + num_seqs) + program, num_tokens, tl.num_programs(0) // HEADS,
              head, GROUP, HEADS, HEAD_V, COLUMNS)  # fmt: skip
    if seq < 0:
        return
    first_token = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - first_token
    length = tl.load(seqlens_kv + seq)
    there = tl.arange(0, ROWS) // GROUP < num_queries
    first_wide = num_items + seq * APART
    # Each form has names of its own: one name may not be a tile of two shapes, and paddings differ.
    if extra < 0:
        o, lse = attend_item(
            q_ptr, q_stride_token, q_stride_head, k_codes, k_scales, v_codes, v_scales, shifts,
            page_units, k_outer, v_outer, None, page_table, max_pages, seq, first_token, num_queries,
            length, head, 0, program - first, splits, per_split, softmax_scale, cap, 0, sink, recent,
            GROUP, HEADS, PAGE, ROWS, TILE, K, HEAD_K, PAD_K, V, HEAD_V, PAD_V, K_OUTER, V_OUTER,
            True, False, SOFTCAP, False, FULL, False, False, PTX, NARROW,
        )  # fmt: skip
        slot = (program.to(tl.int64) * HEADS + head) * ROWS + tl.arange(0, ROWS)
        _store_part(partial, partial_lse, slot, o, lse, there, COLUMNS, HEAD_V)
    else:
        share = extra % APART
        wide_o, wide_lse = attend_item(
            wide_q_ptr, wide_q_stride_token, wide_q_stride_head,
            wide_k_codes, wide_k_scales, wide_v_codes, wide_v_scales, shifts, wide_units,
            k_outer, v_outer, None, wide_page_table, wide_max_pages, seq, first_token, num_queries, length,
            head, 0, share, APART, per_split, softmax_scale, cap, recent, sink, recent,
            GROUP, HEADS, PAGE, ROWS, WIDE_TILE, WIDE_K, HEAD_K, WIDE_PAD_K, WIDE_V, HEAD_V, WIDE_PAD_V,
            WIDE_K_OUTER, WIDE_V_OUTER, True, True, SOFTCAP, False, FULL, False, False, PTX, WIDE, False,
            WIDE_STAGES,
        )  # fmt: skip
        slot = ((first_wide + share).to(tl.int64) * HEADS + head) * ROWS + tl.arange(0, ROWS)
        _store_part(partial, partial_lse, slot, wide_o, wide_lse, there, WIDE_COLUMNS, HEAD_V)
    if JOIN > 0:
        tl.debug_barrier()
        arrived_before = tl.atomic_add(arrived + first * HEADS + head, 1, sem="acq_rel")
        if arrived_before == splits + APART - 1:
            r = tl.arange(0, JOIN)
            _join_both(
                partial, partial_lse, sinks, out, first, splits, first_wide, APART, first_token,
                r, r // GROUP < num_queries, head,
                GROUP, HEADS, HEAD_V, COLUMNS, ROWS, JOIN, AT_ONCE, SINKS, V.rotated, WIDE_V.rotated,
            )  # fmt: skip
            tl.store(arrived + first * HEADS + head, 0)


@triton.jit(do_not_specialize=("num_seqs", "target", "least", "num_items", "per_program"))
def combine_both(
    partial, partial_lse, sinks, out, cu_seqlens_q, seqlens_kv, tokens,
    num_seqs, target, least, num_items, per_program,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_V: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr, APART: tl.constexpr,
    SINKS: tl.constexpr, LISTED: tl.constexpr, ROTATED: tl.constexpr, WIDE_ROTATED: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Program: joins the parts of `both_attention` for per_program query heads of a token.

    num_items: of that launch. tokens: as in `combine`. Tokens of no sequence get zeros.
    """
    if AHEAD:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    first_head = tl.program_id(0) * per_program % (HEADS * GROUP)
    token = tl.program_id(0) * per_program // (HEADS * GROUP)
    if LISTED:
        seq, first, splits = listed(tokens, token)
    else:
        per_split = tiles_per_split(cu_seqlens_q, seqlens_kv, num_seqs, 0, target, least,
                                    GROUP, ROWS, TILE, True, False, True, LANES)  # fmt: skip
        seq, first, splits = find_token(token, per_split, cu_seqlens_q, seqlens_kv, num_seqs, 0,
                                        GROUP, ROWS, TILE, True, False, LANES)  # fmt: skip
    if AHEAD and EARLY:
        gdc_wait()
    if seq < 0:
        c = tl.arange(0, PAD)
        for i in range(per_program):
            at = (token.to(tl.int64) * (HEADS * GROUP) + first_head + i) * HEAD_V + c
            tl.store(out + at, tl.zeros((PAD,), out.dtype.element_ty), mask=c < HEAD_V)
        return
    first_token = tl.load(cu_seqlens_q + seq)
    first_wide = num_items + seq * APART
    for i in range(per_program):
        head = (first_head + i) // GROUP
        r = (token - first_token) * GROUP + (first_head + i) % GROUP + tl.arange(0, 1)
        _join_both(
            partial, partial_lse, sinks, out, first, splits, first_wide, APART, first_token,
            r, r >= 0, head,
            GROUP, HEADS, HEAD_V, PAD, ROWS, 1, AT_ONCE, SINKS, ROTATED, WIDE_ROTATED,
        )  # fmt: skip
