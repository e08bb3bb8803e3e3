"""Join attention over two sets of keys by their log-sum-exp."""

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
    """Program (token, AT_ONCE heads). a, b, out: [tokens, heads, D], heads side by side.

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
