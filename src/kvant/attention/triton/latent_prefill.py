"""Long runs of queries over latents: first expands the decoded rows to keys and values of all heads.

A query of a head costs 1088 multiplications with a stored row of 512 + 64 numbers, and 320 with a key of
192 and a value of 128. Expanding costs 131,072 per row and head, so it is cheaper from a few hundred queries
on. Rows that earlier steps stored are expanded in pieces, which bounds memory. Parts are joined by
their log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.attention.base import AttentionParams, Expand, LongQuery, Step
from kvant.attention.triton.prefill import decoded, join
from kvant.kv.pool import LayerCache

MOST_BYTES = 1 << 28
"""Maximum bytes of expanded keys and values at once; the tokens of one page may exceed it."""


def attend_expanded(
    cache: LayerCache,
    q: Tensor,
    out: Tensor,
    step: Step,
    params: AttentionParams,
    expand: Expand,
) -> None:
    """Writes the rows of `step.long` in out [T, num_q_heads, head_dim of values].

    q: [T, num_q_heads, head_dim of keys], in 16 bits. expand: see `ExpandingBackend`.
    """
    heads, width = q.shape[1:]
    at_once = max(cache.page_size, MOST_BYTES // (4 * heads * width))
    for one in step.long:
        rows = slice(one.first_token, one.first_token + one.num_tokens)
        before = one.length - one.num_tokens
        # The step's own tokens come first: one per query, so causal.
        found, lse = _part(cache, q[rows], step, params, expand, one, before, one.length)
        for start in range(0, before, at_once):
            end = min(before, start + at_once)
            part, part_lse = _part(cache, q[rows], step, params, expand, one, start, end)
            total = torch.empty_like(found, dtype=torch.float32)
            lse = join(found, lse, part, part_lse, total)
            found = total
        out[rows] = found[..., : out.shape[2]]


def _part(
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
    expand: Expand,
    one: LongQuery,
    start: int,
    end: int,
) -> tuple[Tensor, Tensor]:
    """Attends with q [n, heads, width] over tokens start .. end: [n, heads, width], log-sum-exp [heads, n].

    Causal if these are the queries' own tokens; otherwise every query sees all of them.
    """
    stored = decoded(cache, 0, step, one, end - start, q.dtype, skipped=start)
    k, v = expand(stored[0, :, 0])
    if v.shape[2] < k.shape[2]:  # torch's attention needs equal widths
        v = F.pad(v, (0, k.shape[2] - v.shape[2]))
    causal = end == one.length
    sides = [x.transpose(0, 1)[None] for x in (q, k, v)]
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        *sides, 0.0, causal, False, scale=params.scale
    )
    return found[0][0].transpose(0, 1).contiguous(), found[1][0].contiguous()
