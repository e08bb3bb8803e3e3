"""Attention over layers with wide rows: each query reads some keys in their wide form, the others as stored.

    narrow rows of all tokens, and wide rows of the tokens that some query reads wide, side by side
    -> one softmax over both, with masks that show every key to a query in one form

Pages of wide rows before the first query's window may belong to other sequences already. They are cut off
before any arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, Step
from kvant.attention.reference.scores import attend_masked
from kvant.attention.reference.tiles import WideForm, attend_tiles, reads_wide
from kvant.kv.codecs import codec_for
from kvant.kv.pool import LayerCache
from kvant.kv.spec import Choice


def attend_both(
    cache: LayerCache,
    q: Tensor,
    step: Step,
    params: AttentionParams,
    compute: torch.dtype,
    *,
    tiled: bool,
) -> Tensor:
    """Implements `ReferenceBackend.attend` for a cache with wide rows: q [T, num_q_heads, head_dim_k].

    Returns [T, num_q_heads, head_dim_v]. tiled: in tiles at fixed positions.
    """
    assert cache.wide is not None
    assert cache.spec.wide is not None
    assert step.causal, "wide rows are those of causal layers"
    assert params.window is None, "wide rows are those of layers that see every token"
    sink, recent = cache.spec.wide.sink, cache.spec.wide.recent
    wide_step = step.of(cache.wide_group)
    out = q.new_zeros(q.shape[0], q.shape[1], cache.spec.geometry.head_dim_v)
    offsets = step.cu_seqlens_q.tolist()
    for sequence, length in enumerate(step.seqlens_kv.tolist()):
        start, end = offsets[sequence], offsets[sequence + 1]
        if start == end or length == 0:
            continue
        queries = q[start:end].to(compute)
        position = length - len(queries)
        k, v = _rows(cache, step, sequence, 0, length, compute)
        first = max(0, position - recent + 1)  # the first recent row
        head = min(sink, first)
        parts = [
            _rows(cache.wide, wide_step, sequence, begin, stop, compute)
            for begin, stop in ((0, head), (first, length))
        ]
        wide_k, wide_v = (torch.cat(side) for side in zip(*parts, strict=True))
        if tiled:
            gap = first - head
            form = WideForm(_spread(wide_k, head, gap), _spread(wide_v, head, gap), sink, recent)
            out[start:end] = attend_tiles(
                queries, k, v, first=0, position=position, causal=True, params=params, wide=form
            )
            continue
        is_wide = reads_wide(len(queries), length, position, 0, sink, recent)
        is_seen = torch.arange(length) <= torch.arange(position, length)[:, None]
        there = torch.cat([torch.arange(head), torch.arange(first, length)])
        mask = torch.cat([is_seen & ~is_wide, (is_seen & is_wide)[:, there]], 1).to(q.device)
        both = torch.cat([k, wide_k]), torch.cat([v, wide_v])
        out[start:end] = attend_masked(queries, *both, mask, params)
    return out


def _rows(
    cache: LayerCache, step: Step, sequence: int, first: int, end: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns decoded k and v of a sequence's tokens first..end: [end - first, num_kv_heads, head_dim]."""
    size = cache.page_size
    first_page = first // size
    pages = step.page_table[sequence, first_page : -(-end // size)]
    k, v = (
        rows_of(planes, choice, scale, pages, dtype)
        for planes, choice, scale in (
            (cache.k, cache.spec.k, cache.k_scale),
            (cache.v, cache.spec.v, cache.v_scale),
        )
    )
    within = slice(first - first_page * size, end - first_page * size)
    return k[within], v[within]


def _spread(rows: Tensor, head: int, gap: int) -> Tensor:
    """Inserts `gap` rows of zeros after the first `head` rows."""
    return torch.cat([rows[:head], rows.new_zeros(gap, *rows.shape[1:]), rows[head:]])


def rows_of(
    planes: Sequence[Tensor],
    choice: Choice | None,
    scale: Tensor | None,
    pages: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Gathers and decodes rows of whole pages: [len(pages) * page_size, num_kv_heads, head_dim].

    pages: [n] page ids. scale: outside the pages, [1] or [num_kv_heads], or None.
    """
    assert choice is not None, "a layer with a cache stores K, and V if there is one"
    gathered = [plane.index_select(0, pages).flatten(0, 1) for plane in planes]
    return codec_for(choice.dtype).decode(gathered, scale, dtype)
