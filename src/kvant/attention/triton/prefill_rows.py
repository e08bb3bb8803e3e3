"""Helper kernels for prompts: copy sequences' rows to equal blocks and back, join two attention results."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=("a_lse_head", "b_lse_head"),
    do_not_specialize_on_alignment=("a", "a_lse", "b", "b_lse", "out", "out_lse"),
)
def join_rows(
    a, a_token, a_lse, a_lse_head, b, b_token, b_lse, b_lse_head, out, out_lse, num_heads,
    D: tl.constexpr, PAD: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program (token, AT_ONCE heads). a, b, out: [tokens, heads, D], with adjacent heads.

    a_lse, b_lse: [heads, tokens] in natural logarithms, as is out_lse (contiguous).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    there = head < num_heads
    c = tl.arange(0, PAD)
    mask = there[:, None] & (c < D)[None, :]
    at = head[:, None] * D + c[None, :]
    x = tl.load(a_lse + head * a_lse_head + token, mask=there, other=0.0)
    y = tl.load(b_lse + head * b_lse_head + token, mask=there, other=0.0)
    top = tl.maximum(x, y)
    u = tl.exp(x - top)
    w = tl.exp(y - top)
    left = tl.load(a + token * a_token + at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(b + token * b_token + at, mask=mask, other=0.0).to(tl.float32)
    total = (left * u[:, None] + right * w[:, None]) / (u + w)[:, None]
    tl.store(out + token * (num_heads * D) + at, total.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + head * tl.num_programs(0) + token, top + tl.log(u + w), mask=there)


@triton.jit(do_not_specialize=("first_seq", "size", "spare"))
def pack_rows(
    x, stride, blocks, cu_seqlens_q, first_seq, size, spare, WIDTH: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    """Program (row, block): block b [size, WIDTH] gets the rows of sequence first_seq + b.

    They come after `spare` rows; all other rows become zeros. x: [T, WIDTH], rows `stride` apart.
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
    """Program (row, block): copies the blocks of `pack_rows` with spare 0 back into out [T, WIDTH]."""
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
