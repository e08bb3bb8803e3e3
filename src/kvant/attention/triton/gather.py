"""Gathers keys and values of sequences from their pages, decoded, into contiguous memory."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.paged import row_at
from kvant.attention.triton.rotation import hadamard
from kvant.attention.triton.words import in_order


@triton.jit(do_not_specialize=("page_units", "max_pages", "first_seq", "skipped", "size"))
def gather_rows(
    codes, scales, shifts, page_units, outer, page_table, max_pages, seqlens_kv, first_seq, skipped, out,
    size,
    HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    FORMAT: tl.constexpr, PAD: tl.constexpr, OUTER: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program (TILE tokens, KV head, sequence from `first_seq` on). out: [sequences, size, HEADS, HEAD].

    out begins at token `skipped`; rows past the sequence's end become zeros. FORMAT: `Format` of the pages.
    PAD: words of a row, padded to a power of two. Other arguments: as in `paged_attention`.
    """
    ELEMENTS: tl.constexpr = FORMAT.elements
    FACTOR: tl.constexpr = FORMAT.factor
    EVEN: tl.constexpr = FORMAT.even
    BLOCKS: tl.constexpr = HEAD // FORMAT.block if FORMAT.per_block else 1
    ROTATION: tl.constexpr = HEAD & -HEAD
    to = tl.program_id(0) * TILE + tl.arange(0, TILE)
    pos = skipped + to
    head = tl.program_id(1)
    seq = (first_seq + tl.program_id(2)).to(tl.int64)
    inside_out = to < size
    there = inside_out & (pos < tl.load(seqlens_kv + seq))
    pages = page_table + seq * max_pages
    page = tl.load(pages + pos // PAGE, mask=there, other=0)
    small = pos % PAGE * HEADS + head
    WORDS: tl.constexpr = HEAD // ELEMENTS
    j = tl.arange(0, PAD)
    inside = there[:, None] & (j < WORDS)[None, :]
    UNITS: tl.constexpr = HEAD * FORMAT.bits // FORMAT.word_bits
    words = FORMAT.load(
        row_at(codes, page, small, page_units, UNITS)[:, None], j, inside, shifts, True, PTX
    )
    parts = FORMAT.decode(words, PTX)
    scale = tl.full((TILE,), 1.0, tl.float32)
    zero = tl.zeros((TILE,), tl.float32)
    minimum = zero
    if FORMAT.per_row:
        scale, zero = FORMAT.row_scale(row_at(scales, page, small, page_units, 1), there)
    if FORMAT.minimum:
        minimum = zero
        zero = tl.zeros((TILE,), tl.float32)
    if FORMAT.bias > 0:
        zero += FORMAT.bias
    if OUTER > 0:
        scale *= tl.load(outer + head * (OUTER - 1))
    s = scale[:, None]
    z = zero[:, None]
    if FORMAT.per_block:
        PER: tl.constexpr = FORMAT.block // ELEMENTS  # words of a block
        b = tl.arange(0, PAD // PER)
        at_scales = row_at(scales, page, small, page_units, BLOCKS)
        code = tl.load(at_scales[:, None] + b[None, :],
                       mask=there[:, None] & (b < BLOCKS)[None, :], other=0)  # fmt: skip
        factor = FORMAT.block_scale(code, PTX)
        factor = tl.broadcast_to(factor[:, :, None], (TILE, PAD // PER, PER))
        s = s * tl.reshape(factor, (TILE, PAD)).to(tl.float32)
    numbers = ()
    for e in tl.static_range(ELEMENTS):
        number = parts[e].to(tl.float32) * (FACTOR * (EVEN if e % 2 == 0 else 1.0))
        number = (number - z) * s
        if FORMAT.minimum:
            number += minimum[:, None]
        numbers = numbers + (number,)
    y = in_order(numbers, TILE, PAD)
    if FORMAT.rotated:
        y = hadamard(y, TILE, ELEMENTS * PAD, ROTATION) / ROTATION
    y = tl.where(there[:, None], y, 0.0)
    c = tl.arange(0, ELEMENTS * PAD)
    at = ((tl.program_id(2).to(tl.int64) * size + to) * HEADS + head) * HEAD
    tl.store(out + at[:, None] + c[None, :], y.to(out.dtype.element_ty),
             mask=(c < HEAD)[None, :] & inside_out[:, None])  # fmt: skip
