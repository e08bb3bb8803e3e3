"""The writer: encodes rows of K and V and stores them in their slots, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.paged import row_at


@triton.jit
def encode_rows(
    x, page, small, head, there, codes, scales, page_units, outer, count, MOST: tl.constexpr,
    FORMAT: tl.constexpr, OUTER: tl.constexpr, HEAD: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Stores rows x [ROWS, PAD] in `page`, at `small` = (offset in page) * HEADS + head, where `there`.

    page, small, head, there: [ROWS]. codes, scales, page_units: see `row_at`. x is zero past HEAD and where
    not `there`. count: int64, number of values whose magnitude exceeds MOST times the outside scale; MOST 0:
    not counted. OUTER: see `paged_attention`.
    """
    if MOST > 0:
        reach = tl.full((ROWS,), MOST, tl.float32)
        if OUTER > 0:
            reach *= tl.load(outer + head * (OUTER - 1))
        beyond = tl.sum((tl.abs(x.to(tl.float32)) > reach[:, None]).to(tl.int32))
        if beyond > 0:
            tl.atomic_add(count, beyond.to(tl.int64), sem="relaxed")
    WIDTH: tl.constexpr = HEAD * FORMAT.bits // codes.dtype.element_ty.primitive_bitwidth
    to = row_at(codes, page, small, page_units, WIDTH)
    scale_to = scales
    if FORMAT.per_row or FORMAT.per_block:
        SCALES: tl.constexpr = (
            HEAD // FORMAT.block if FORMAT.per_block else 2 if FORMAT.minimum else 1
        )
        scale_to = row_at(scales, page, small, page_units, SCALES)
    FORMAT.encode(x, head, there, to, scale_to, outer, FORMAT, OUTER, HEAD, PAD, ROWS, PTX)


@triton.jit
def _store_rows(
    x_ptr, stride_token, stride_head, codes, scales, page_units, outer, slot_mapping, num_rows, count,
    MOST: tl.constexpr, FORMAT: tl.constexpr, OUTER: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = r < num_rows
    token = r // HEADS
    head = r % HEADS
    slot = tl.load(slot_mapping + token, mask=there, other=-1)
    there = there & (slot >= 0)
    page = slot // PAGE
    small = (slot % PAGE).to(tl.int32) * HEADS + head
    c = tl.arange(0, PAD)
    mask = there[:, None] & (c < HEAD)[None, :]
    at = token.to(tl.int64) * stride_token + head * stride_head
    x = tl.load(x_ptr + at[:, None] + c[None, :], mask=mask, other=0.0)
    encode_rows(x, page, small, head, there, codes, scales, page_units, outer, count, MOST, FORMAT, OUTER,
                HEAD, PAD, ROWS, PTX)  # fmt: skip


@triton.jit(do_not_specialize=("num_rows", "page_units"))
def store_rows(
    k, k_stride_token, k_stride_head, k_codes, k_scales, k_outer,
    v, v_stride_token, v_stride_head, v_codes, v_scales, v_outer,
    page_units, slot_mapping, num_rows, counts, MOST_K: tl.constexpr, MOST_V: tl.constexpr,
    HEADS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
    K: tl.constexpr, OUTER_K: tl.constexpr, HEAD_K: tl.constexpr, PAD_K: tl.constexpr,
    V: tl.constexpr, OUTER_V: tl.constexpr, HEAD_V: tl.constexpr, PAD_V: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, side). A row is one token and KV head; num_rows = tokens * HEADS.

    k, v: [tokens, HEADS, HEAD_K], [tokens, HEADS, HEAD_V] by their strides. K, V: their `Format`.
    page_units: see `row_at`. slot_mapping: int64 [tokens], -1 stores nothing. counts: int64 [2], for K and
    V; see `encode_rows`.
    """
    if tl.program_id(1) == 0:
        _store_rows(
            k, k_stride_token, k_stride_head, k_codes, k_scales, page_units, k_outer, slot_mapping,
            num_rows, counts, MOST_K, K, OUTER_K, HEADS, PAGE, HEAD_K, PAD_K, ROWS, PTX,
        )  # fmt: skip
    else:
        v_counts = counts
        if MOST_V > 0:
            v_counts = counts + 1
        _store_rows(
            v, v_stride_token, v_stride_head, v_codes, v_scales, page_units, v_outer, slot_mapping,
            num_rows, v_counts, MOST_V, V, OUTER_V, HEADS, PAGE, HEAD_V, PAD_V, ROWS, PTX,
        )  # fmt: skip
