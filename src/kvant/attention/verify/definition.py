"""The definition of attention over pages, in float64.

It shares no code with any backend: it finds rows token by token, decodes them by the format's own
definition, and computes every score, mask and sum here. It is slow on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Expand, Step
from kvant.kv.codecs import codec_for
from kvant.kv.pool import LayerCache
from kvant.kv.spec import Choice


def stored_planes(cache: LayerCache, k: Tensor, v: Tensor | None, slots: Tensor) -> list[Tensor]:
    """Returns the expected planes once k and v [T, num_kv_heads, head_dim] are written; K's first.

    v: None if only K is stored. slots: [T] int64; -1 writes nowhere. The cache itself is not written to.
    """
    keep = slots >= 0
    found = []
    for planes, choice, rows, scale in (
        (cache.k, cache.spec.k, k, cache.k_outside),
        (cache.v, cache.spec.v, v, cache.v_scale),
    ):
        if choice is None or rows is None:
            continue
        encoded = codec_for(choice.dtype).encode(rows[keep], scale)
        for plane, part in zip(planes, encoded, strict=True):
            after = plane.contiguous().clone()
            after.flatten(0, 1)[slots[keep]] = part
            found.append(after)
    return found


def attend(cache: LayerCache, q: Tensor, step: Step, params: AttentionParams) -> Tensor:
    """Attends with q [T, num_q_heads, head_dim_k]; returns float64 [T, num_q_heads, head_dim_v]."""
    g = cache.spec.geometry
    out = torch.zeros(len(q), g.num_q_heads, g.head_dim_v, dtype=torch.float64, device=q.device)
    offsets = step.cu_seqlens_q.tolist()
    for sequence, length in enumerate(step.seqlens_kv.tolist()):
        start, end = offsets[sequence], offsets[sequence + 1]
        if start == end:
            continue
        seen = see(cache, q[start:end], step, params, sequence, length)
        scores, v = seen.scores, seen.v
        if cache.wide is not None:
            scores, v = _with_wide(cache, q[start:end], step, params, sequence, length, seen)
        if params.sinks is not None:  # a sink is one more logit, with a zero value
            sinks = params.sinks.double().view(-1, 1, 1).expand(-1, end - start, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1)[..., : len(v)]
        out[start:end] = torch.einsum("hnm,mhd->nhd", weights, v)
    return out


def _with_wide(
    cache: LayerCache, q: Tensor, step: Step, params: AttentionParams, sequence: int, length: int,
    narrow: Seen,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns scores [num_q_heads, n, 2 m], values [2 m, num_q_heads, head_dim_v]: m rows in both forms."""
    assert cache.wide is not None
    assert cache.spec.wide is not None
    wide = see(cache.wide, q, step.of(cache.wide_group), params, sequence, length)
    key = torch.arange(length, device=q.device)
    query = torch.arange(length - len(q), length, device=q.device)[:, None]
    is_wide = (key < cache.spec.wide.sink) | (query - key < cache.spec.wide.recent)
    # The page of a row that no query reads wide may have been released, and hold another sequence's bytes.
    unread = ~(is_wide & (key <= query)).any(0)
    v = wide.v.masked_fill(unread[:, None, None], 0.0)
    hidden = torch.full_like(narrow.scores, float("-inf"))
    scores = [
        torch.where(is_wide, hidden, narrow.scores),
        torch.where(is_wide & ~unread, wide.scores, hidden),
    ]
    return torch.cat(scores, -1), torch.cat([narrow.v, v])


def attend_expanded(
    cache: LayerCache, q: Tensor, step: Step, params: AttentionParams, expand: Expand
) -> Tensor:
    """Attends with q [T, heads, head_dim] to expanded rows; returns float64 [T, heads, head_dim_v].

    Rows outside `step.long` are zeros. expand: takes float64 rows of latents.
    """
    found: Tensor | None = None
    for one in step.long:
        rows = slice(one.first_token, one.first_token + one.num_tokens)
        slots = _slots_of(cache, step, one.sequence, one.length)
        k, v = expand(_decoded(cache.k, cache.spec.k, cache.k_scale, slots)[:, 0])
        scores = torch.einsum("nhd,mhd->hnm", q[rows].double(), k) * params.scale
        token = torch.arange(one.length, device=q.device)
        query = token[one.length - one.num_tokens :, None]
        weights = torch.softmax(scores.masked_fill_(token > query, float("-inf")), -1)
        if found is None:
            found = v.new_zeros(*q.shape[:2], v.shape[2])
        found[rows] = torch.einsum("hnm,mhd->nhd", weights, v)
    assert found is not None, "the step has long runs of queries"
    return found


def _slots_of(cache: LayerCache, step: Step, sequence: int, length: int) -> Tensor:
    token = torch.arange(length, device=step.page_table.device)
    pages = step.page_table[sequence].long()[token // cache.page_size]
    return pages * cache.page_size + token % cache.page_size


@dataclass(frozen=True, slots=True)
class Seen:
    """The scores and rows of one sequence's queries, in float64, per query head.

    scores: [num_q_heads, n, m], -inf where a query does not see a key. k, v: [m, num_q_heads, head_dim].
    slots: [m], slots of its tokens.
    """

    scores: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor


def see(
    cache: LayerCache, q: Tensor, step: Step, params: AttentionParams, sequence: int, length: int
) -> Seen:
    """Computes the scores of one sequence's queries q [n, num_q_heads, head_dim_k].

    length: its stored tokens.
    """
    g = cache.spec.geometry
    group = g.num_q_heads // g.num_kv_heads
    token = torch.arange(length, device=q.device)
    slots = _slots_of(cache, step, sequence, length)
    k = _decoded(cache.k, cache.spec.k, cache.k_scale, slots)
    if cache.spec.v is None:  # the latent is also the value
        v = k[..., : g.head_dim_v]
    else:
        v = _decoded(cache.v, cache.spec.v, cache.v_scale, slots)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    query = torch.arange(length - len(q), length, device=q.device)[:, None]
    scores.masked_fill_(~_sees(query, token, step.causal, params.window), float("-inf"))
    return Seen(scores, k, v, slots)


def _sees(query: Tensor, key: Tensor, causal: bool, window: int | None) -> Tensor:
    """Returns which key positions a query sees: earlier ones or all, within the window if any."""
    seen = key <= query if causal else torch.ones_like(key <= query)
    return seen if window is None else seen & ((query - key).abs() < window)


def _decoded(
    planes: Sequence[Tensor],
    choice: Choice | None,
    scale: Tensor | None,
    slots: Tensor,
) -> Tensor:
    """Decodes the rows of these slots: float64 [len(slots), num_kv_heads, head_dim]."""
    assert choice is not None, "a layer with a cache stores K, and V if there is one"
    rows = [plane[slots // plane.shape[1], slots % plane.shape[1]] for plane in planes]
    return codec_for(choice.dtype).decode(rows, scale, torch.float64)
