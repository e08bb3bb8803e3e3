"""Keys and values of sequences out of their pages, decoded, side by side in memory."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.codec import (
    BLOCK,
    E2M1,
    INT8,
    ROW,
    ROW_ZERO,
    UINT4,
    block_factor,
    unpack,
)
from kvant.attention.triton.rotation import hadamard


@triton.jit(do_not_specialize=("max_pages", "first_seq", "skipped", "size"))
def gather_rows(
    codes, scales, outer_ptr, page_table, max_pages, seqlens_kv, first_seq, skipped, out, size,
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
    words = tl.load(codes + row[:, None] * WORDS + j[None, :], mask=inside, other=0)
    parts = unpack(words, KIND, PTX)
    scale = tl.full((TILE,), 1.0, tl.float32)
    zero = tl.zeros((TILE,), tl.float32)
    if SCALING == ROW:
        scale = tl.load(scales + row, mask=there, other=0.0)
    elif SCALING == ROW_ZERO:
        bits = tl.load(scales + row, mask=there, other=0)
        scale = (bits & -16).to(tl.float32, bitcast=True)
        zero = (bits & 15).to(tl.float32)
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
    if ELEMENTS == 1:
        y = (parts[0].to(tl.float32) * FACTOR - z) * s
    elif ELEMENTS == 2:
        y = tl.join((parts[0].to(tl.float32) * FACTOR - z) * s,
                    (parts[1].to(tl.float32) * FACTOR - z) * s)  # fmt: skip
        y = tl.reshape(y, (TILE, 2 * PAD))
    else:
        even = FACTOR * 16.0 if KIND == UINT4 else FACTOR
        tl.static_assert(KIND == UINT4 or KIND == E2M1)
        y = tl.join(
            tl.join((parts[0].to(tl.float32) * even - z) * s,
                    (parts[2].to(tl.float32) * even - z) * s),
            tl.join((parts[1].to(tl.float32) * FACTOR - z) * s,
                    (parts[3].to(tl.float32) * FACTOR - z) * s),
        )  # fmt: skip
        y = tl.reshape(y, (TILE, 4 * PAD))
    if ROTATION > 0:
        y = hadamard(y, TILE, ELEMENTS * PAD, ROTATION) / ROTATION
    y = tl.where(there[:, None], y, 0.0)
    c = tl.arange(0, ELEMENTS * PAD)
    at = ((tl.program_id(2).to(tl.int64) * size + to) * HEADS + head) * HEAD
    tl.store(out + at[:, None] + c[None, :], y.to(out.dtype.element_ty),
             mask=(c < HEAD)[None, :] & inside_out[:, None])  # fmt: skip
