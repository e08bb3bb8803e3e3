"""Copy rows of several sequences of a step into equal blocks, and back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("first_seq", "size", "spare"))
def pack_rows(
    x, stride, blocks, cu_seqlens_q, first_seq, size, spare, WIDTH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """Program (row, block): block b [size, WIDTH] gets the rows of sequence first_seq + b.

    They follow `spare` rows; all other rows become zeros. x: [T, WIDTH], rows `stride` apart.
    """
    row = tl.program_id(0)
    block = tl.program_id(1)
    first = tl.load(cu_seqlens_q + first_seq + block)
    count = tl.load(cu_seqlens_q + first_seq + block + 1) - first
    at = row - spare
    width = tl.where((at >= 0) & (at < count), WIDTH, 0)
    c = tl.arange(0, PAD)
    source = x + (first + at).to(tl.int64) * stride
    value = tl.load(source + c, mask=c < width, other=0.0)
    target = blocks + (block.to(tl.int64) * size + row) * WIDTH
    tl.store(target + c, value, mask=c < WIDTH)


@triton.jit(do_not_specialize=("first_seq", "size"))
def unpack_rows(
    blocks, out, cu_seqlens_q, first_seq, size, WIDTH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """Program (row, block): copy the blocks of `pack_rows` with spare 0 back into out [T, WIDTH]."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    first = tl.load(cu_seqlens_q + first_seq + block)
    count = tl.load(cu_seqlens_q + first_seq + block + 1) - first
    if row >= count:
        return
    c = tl.arange(0, PAD)
    mask = c < WIDTH
    value = tl.load(blocks + (block.to(tl.int64) * size + row) * WIDTH + c, mask=mask)
    tl.store(out + (first + row).to(tl.int64) * WIDTH + c, value, mask=mask)
