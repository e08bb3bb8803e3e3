"""Attention of one sequence's queries over its decoded rows: masks, soft cap, sinks, grouping."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvant.attention.base import AttentionParams


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, *, offset: int, causal: bool, params: AttentionParams
) -> Tensor:
    """Attends with q [n, Hq, Dk] over k [m, Hkv, Dk] and v [m, Hkv, Dv]; returns [n, Hq, Dv].

    Query i is at row offset + i of k. All three have one dtype, which is used for all arithmetic.
    Every query must see at least one row.
    """
    window = params.window
    mask = visible(len(q), len(k), offset=offset, causal=causal, window=window, device=q.device)
    return attend_masked(q, k, v, mask, params)


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attends like `attend_rows`. mask: [n, m] bool, which rows each query sees; None for all."""
    if params.softcap or params.sinks is not None:
        return _explicit(q, k, v, mask, params)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=params.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def visible(
    n: int, m: int, *, offset: int, causal: bool, window: int | None, device: torch.device
) -> Tensor | None:
    """Returns [n, m] bool, which rows each query sees; None if every query sees every row."""
    ahead = causal and offset < m - 1
    behind = window is not None and offset + n > window
    beyond = window is not None and not causal and m - offset > window
    if not (ahead or behind or beyond):
        return None
    query = torch.arange(offset, offset + n, device=device)[:, None]
    row = torch.arange(m, device=device)
    seen = torch.ones(n, m, dtype=torch.bool, device=device)
    if causal:
        seen &= row <= query
    if window is not None:
        seen &= row > query - window
        if not causal:
            seen &= row < query + window
    return seen


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attends like `attend_masked` with explicit scores, for cases that torch's fused attention lacks.

    Soft cap: cap * tanh(score / cap), before the mask (Gemma 2, arXiv:2408.00118, section 2).
    Sinks: one more logit per query head in the softmax's sum, with a zero value (gpt-oss).
    """
    n, num_q_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    grouped = q.view(n, num_kv_heads, group, -1).permute(1, 2, 0, 3)  # [Hkv, group, n, Dk]
    scores = torch.matmul(grouped, k.permute(1, 2, 0)[:, None]) * params.scale  # [Hkv, group, n, m]
    if params.softcap:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.to(scores).view(num_kv_heads, group, 1, 1).expand(-1, -1, n, 1)
        weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    out = torch.matmul(weights, v.transpose(0, 1)[:, None])  # [Hkv, group, n, Dv]
    return out.permute(2, 0, 1, 3).reshape(n, num_q_heads, -1)
