"""Attention in tiles at fixed positions, so that a query's result depends on its own rows alone.

Tiles of queries and rows begin at multiples of their sizes, counted from the sequence's first token.
So a query has the same place in the same products, alone or in a chunk of any size. A tile in which
it sees no row changes no bit. The softmax is the online softmax of arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.attention.base import AttentionParams
from kvant.attention.reference.scores import visible

QUERY_TILE = 16
ROW_TILE = 256


@dataclass(frozen=True, slots=True)
class WideForm:
    """The wide rows of a sequence, k [m, Hkv, Dk] and v [m, Hkv, Dv], from its first token on.

    Rows that no query reads wide are zeros. sink, recent: as in `kvant.kv.spec.WideRows`.
    """

    k: Tensor
    v: Tensor
    sink: int
    recent: int


def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first: int,
    position: int,
    causal: bool,
    params: AttentionParams,
    wide: WideForm | None = None,
) -> Tensor:
    """Attends with q [n, Hq, Dk] over k [m, Hkv, Dk] and v [m, Hkv, Dv], in one dtype; returns [n, Hq, Dv].

    first: position of row 0 in its sequence, a multiple of ROW_TILE. position: position of query 0.
    wide: rows that queries read instead of some of k and v; `first` is then 0, and there is no window.
    """
    assert first % ROW_TILE == 0, "rows begin where a tile begins"
    n, num_q_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    before = position % QUERY_TILE
    q = F.pad(q, (0, 0, 0, 0, before, -(before + n) % QUERY_TILE))
    tiles = [_tile_of_rows(k, v, start) for start in range(0, len(k), ROW_TILE)]
    wide_tiles = []
    if wide is not None:
        wide_tiles = [_tile_of_rows(wide.k, wide.v, start) for start in range(0, len(k), ROW_TILE)]
    parts = []
    for begin in range(0, len(q), QUERY_TILE):
        tile = q[begin : begin + QUERY_TILE].view(QUERY_TILE, num_kv_heads, group, -1)
        tile = tile.permute(1, 2, 0, 3).reshape(num_kv_heads, group * QUERY_TILE, -1)
        offset = position - before + begin - first
        seen = min(len(k), offset + QUERY_TILE) if causal else len(k)
        count = -(-seen // ROW_TILE)
        masks = [
            _seen(offset - start, len(k) - start, causal, params.window, q.device)
            for start in range(0, count * ROW_TILE, ROW_TILE)
        ]
        rows = [(*one, mask) for one, mask in zip(tiles, masks, strict=False)]
        if wide is not None:
            forms = [
                reads_wide(QUERY_TILE, ROW_TILE, offset - start, start, wide.sink, wide.recent)
                for start in range(0, count * ROW_TILE, ROW_TILE)
            ]
            forms = [form.to(q.device) for form in forms]
            rows = [
                (*one, _both(~form, mask))
                for one, mask, form in zip(tiles, masks, forms, strict=False)
            ]
            rows += [
                (*one, _both(form, mask))
                for one, mask, form in zip(wide_tiles, masks, forms, strict=False)
            ]
        out = _attend_tile(tile, rows, params)
        out = out.view(num_kv_heads, group, QUERY_TILE, -1).permute(2, 0, 1, 3)
        parts.append(out.flatten(1, 2))
    return torch.cat(parts)[before : before + n]


def _tile_of_rows(k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Returns keys [Hkv, Dk, ROW_TILE] and values [Hkv, ROW_TILE, Dv] from `start`, zeros past the end."""
    k, v = (
        F.pad(x[start : start + ROW_TILE], (0, 0, 0, 0, 0, max(0, start + ROW_TILE - len(x))))
        for x in (k, v)
    )
    return k.permute(1, 2, 0).contiguous(), v.transpose(0, 1).contiguous()


def _attend_tile(
    q: Tensor,
    tiles: Iterable[tuple[Tensor, Tensor, Tensor | None]],
    params: AttentionParams,
) -> Tensor:
    """Attends with one tile of queries, [Hkv, group * QUERY_TILE, Dk], over tiles of rows; returns [.., Dv].

    tiles: keys, values, and which rows each query sees, [QUERY_TILE, ROW_TILE] bool; None for all.
    """
    num_kv_heads, num_rows, _ = q.shape
    group = num_rows // QUERY_TILE
    if params.sinks is None:
        most = q.new_full((num_kv_heads, num_rows, 1), float("-inf"))
        total = q.new_zeros(num_kv_heads, num_rows, 1)
    else:  # a sink is one more logit, with a zero value
        sinks = params.sinks.to(q).view(num_kv_heads, group, 1)
        most = sinks.repeat_interleave(QUERY_TILE, 1)
        total = torch.ones_like(most)
    found: Tensor | float = 0.0
    for keys, values, seen in tiles:
        scores = torch.bmm(q, keys) * params.scale
        if params.softcap:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        if seen is not None:
            scores = scores.masked_fill(~seen.repeat(group, 1), float("-inf"))
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        level = higher.masked_fill(higher == float("-inf"), 0.0)  # if no row was seen so far
        weights = torch.exp(scores - level)
        keep = torch.exp(most - level)
        total = total * keep + weights.sum(-1, keepdim=True)
        found = found * keep + torch.bmm(weights, values)
        most = higher
    assert isinstance(found, Tensor), "a query sees itself"
    return found / total


def reads_wide(n: int, m: int, offset: int, start: int, sink: int, recent: int) -> Tensor:
    """Returns [n, m] bool: whether query i, at row offset + i, reads row j in its wide form.

    start: position of row 0 in its sequence.
    """
    query = torch.arange(offset, offset + n)[:, None]
    row = torch.arange(m)
    return (row + start < sink) | (query - row < recent)


def _both(a: Tensor, b: Tensor | None) -> Tensor:
    return a if b is None else a & b


def _seen(
    offset: int, length: int, causal: bool, window: int | None, device: torch.device
) -> Tensor | None:
    """Returns [QUERY_TILE, ROW_TILE] bool, which rows of a tile each query sees; None for all."""
    seen = visible(QUERY_TILE, ROW_TILE, offset=offset, causal=causal, window=window, device=device)
    if length >= ROW_TILE:
        return seen
    exists = (torch.arange(ROW_TILE, device=device) < length).expand(QUERY_TILE, -1)
    return exists if seen is None else seen & exists
