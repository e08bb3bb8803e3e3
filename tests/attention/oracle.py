"""The judge: transformers' own eager attention in float64, over rows read out of pages one by one.

Shares no code with the reference backend: the arithmetic is transformers', the masks come from a
plain definition of which key a query sees, and rows are found token by token. gpt-oss's eager
function does its softmax in float64 when given float64 (with sinks of minus infinity it is plain
attention); Gemma 2's, the one with a soft cap, does it in float32: there the judge itself errs by
about 1e-7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_sinks

from kvant.attention.base import AttentionParams, Step
from kvant.kv.codecs import codec_for
from kvant.kv.pool import LayerCache


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the two eager functions ask of the module they are called for."""

    num_key_value_groups: int
    sinks: Tensor
    training: bool = False


def sees(query: Tensor, key: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Whether the token at position `query` sees the one at position `key`."""
    ahead = torch.zeros_like(query - key, dtype=torch.bool) if not causal else key > query
    far = torch.zeros_like(ahead) if window is None else (query - key).abs() >= window
    return ~(ahead | far)


def stored_rows(cache: LayerCache, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Decoded K and V of one sequence in float64: [length, num_kv_heads, head_dim]."""
    sides = []
    token = torch.arange(length)
    for planes, made, scale in (
        (cache.k, cache.spec.k, cache.k_scale),
        (cache.v, cache.spec.v, cache.v_scale),
    ):
        assert made is not None
        page, offset = pages.long()[token // cache.page_size], token % cache.page_size
        rows = tuple(plane[page, offset] for plane in planes)
        sides.append(codec_for(made.dtype).decode(rows, scale, torch.float64))
    return sides[0], sides[1]


def attend(cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
    """What `AttentionBackend.attend` should give, in float64; zeros for padding."""
    geometry = cache.spec.geometry
    groups = geometry.num_q_heads // geometry.num_kv_heads
    out = torch.zeros(q.shape[0], geometry.num_q_heads, geometry.head_dim_v, dtype=torch.float64)
    for sequence in range(len(step.seqlens_kv)):
        start, end = (int(x) for x in step.cu_seqlens_q[sequence : sequence + 2])
        length = int(step.seqlens_kv[sequence])
        if start == end:
            continue
        k, v = stored_rows(cache, step.page_table[sequence], length)
        first = length - (end - start)
        query, key = torch.arange(first, length)[:, None], torch.arange(length)[None]
        seen = sees(query, key, causal=step.causal, window=params.window)
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))
        no_sinks = torch.full([geometry.num_q_heads], float("-inf"))
        sinks = no_sinks if params.sinks is None else params.sinks
        facts = _Facts(groups, sinks.double())
        eager: Any = eager_sinks
        if params.softcap:
            assert params.sinks is None, "no model of transformers has both; see test_scores.py"
            eager = partial(eager_softcap, softcap=params.softcap)
        found, _ = eager(
            facts,
            q[start:end].double().transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            mask[None, None],
            scaling=params.scale,
            dropout=0.0,
        )
        out[start:end] = found[0]
    return out
