"""Keys and values of sequences out of their pages, decoded, side by side in memory."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.codec import (
    BLOCK,
    INT8,
    NO_SCALE,
    ROW_MINIMUM,
    block_factor,
    in_order,
    load_words,
    row_scales,
    times,
    unpack,
)
from kvant.attention.triton.rotation import hadamard


@triton.jit(do_not_specialize=("max_pages", "first_seq", "skipped", "size"))
def gather_rows(
    codes, scales, shifts, outer_ptr, page_table, max_pages, seqlens_kv, first_seq, skipped, out, size,
    HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    KIND: tl.constexpr, SCALING: tl.constexpr, ELEMENTS: tl.constexpr, FACTOR: tl.constexpr,
    PAD: tl.constexpr, OUTER: tl.constexpr, ROTATION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program (TILE tokens, KV head, sequence from `first_seq` on). out: [sequences, size, HEADS, HEAD].

    From token `skipped` on; zeros behind the sequence's end. PAD: words of a row, padded to a power of
    two. ROTATION: length of the blocks that were stored rotated, 0 for none. The rest as in
    `paged_attention`.
    """
    to = tl.program_id(0) * TILE + tl.arange(0, TILE)
    pos = skipped + to
    head = tl.program_id(1)
    seq = (first_seq + tl.program_id(2)).to(tl.int64)
    inside_out = to < size
    there = inside_out & (pos < tl.load(seqlens_kv + seq))
    pages = page_table + seq * max_pages
    page = tl.load(pages + pos // PAGE, mask=there, other=0).to(tl.int64)
    row = (page * PAGE + pos % PAGE) * HEADS + head
    WORDS: tl.constexpr = HEAD // ELEMENTS
    j = tl.arange(0, PAD)
    inside = there[:, None] & (j < WORDS)[None, :]
    UNITS: tl.constexpr = HEAD * 3 // 32 if ELEMENTS == 8 else WORDS
    words = load_words(codes + row[:, None] * UNITS, j, inside, shifts, True, ELEMENTS, PTX)
    parts = unpack(words, KIND, PTX)
    scale = tl.full((TILE,), 1.0, tl.float32)
    zero = tl.zeros((TILE,), tl.float32)
    minimum = zero
    if SCALING != NO_SCALE and SCALING != BLOCK:
        scale, zero = row_scales(scales, row, there, SCALING)
    if SCALING == ROW_MINIMUM:
        minimum = zero
        zero = tl.zeros((TILE,), tl.float32)
    if KIND == INT8:
        zero += 128.0
    if OUTER > 0:
        scale *= tl.load(outer_ptr + head * (OUTER - 1))
    s = scale[:, None]
    z = zero[:, None]
    if SCALING == BLOCK:
        b = tl.arange(0, PAD // 4)
        code = tl.load(scales + row[:, None] * (HEAD // 16) + b[None, :],
                       mask=there[:, None] & (b < HEAD // 16)[None, :], other=0)  # fmt: skip
        factor = tl.broadcast_to(block_factor(code, PTX)[:, :, None], (TILE, PAD // 4, 4))
        s = s * tl.reshape(factor, (TILE, PAD)).to(tl.float32)
    numbers = ()
    for e in tl.static_range(ELEMENTS):
        number = (parts[e].to(tl.float32) * (FACTOR * times(KIND, e)) - z) * s
        if SCALING == ROW_MINIMUM:
            number += minimum[:, None]
        numbers = numbers + (number,)
    y = in_order(numbers, TILE, PAD)
    if ROTATION > 0:
        y = hadamard(y, TILE, ELEMENTS * PAD, ROTATION) / ROTATION
    y = tl.where(there[:, None], y, 0.0)
    c = tl.arange(0, ELEMENTS * PAD)
    at = ((tl.program_id(2).to(tl.int64) * size + to) * HEADS + head) * HEAD
    tl.store(out + at[:, None] + c[None, :], y.to(out.dtype.element_ty),
             mask=(c < HEAD)[None, :] & inside_out[:, None])  # fmt: skip
