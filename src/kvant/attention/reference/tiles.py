"""Attention in tiles at fixed positions, so that a query's result depends on its own rows alone.

Tiles of queries and rows begin at multiples of their sizes, counted from the sequence's first token.
So a query has the same position in the same products, alone or in a chunk of any size. A tile in which
it sees nothing changes no bit.
The softmax is the running one of arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.attention.base import AttentionParams
from kvant.attention.reference.scores import visible

QUERY_TILE = 16
ROW_TILE = 256


def attend_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first: int,
    position: int,
    causal: bool,
    params: AttentionParams,
) -> Tensor:
    """q [n, Hq, Dk], k [m, Hkv, Dk], v [m, Hkv, Dv] -> [n, Hq, Dv], all in one dtype.

    first: position of row 0 in its sequence, a multiple of ROW_TILE. position: position of query 0.
    """
    assert first % ROW_TILE == 0, "rows begin where a tile begins"
    n, num_q_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    group = num_q_heads // num_kv_heads
    before = position % QUERY_TILE
    q = F.pad(q, (0, 0, 0, 0, before, -(before + n) % QUERY_TILE))
    tiles = [_tile_of_rows(k, v, start) for start in range(0, len(k), ROW_TILE)]
    parts = []
    for begin in range(0, len(q), QUERY_TILE):
        tile = q[begin : begin + QUERY_TILE].view(QUERY_TILE, num_kv_heads, group, -1)
        tile = tile.permute(1, 2, 0, 3).reshape(num_kv_heads, group * QUERY_TILE, -1)
        offset = position - before + begin - first
        seen = min(len(k), offset + QUERY_TILE) if causal else len(k)
        rows = tiles[: -(-seen // ROW_TILE)]
        out = _attend_tile(tile, rows, offset, len(k), causal, params)
        out = out.view(num_kv_heads, group, QUERY_TILE, -1).permute(2, 0, 1, 3)
        parts.append(out.flatten(1, 2))
    return torch.cat(parts)[before : before + n]


def _tile_of_rows(k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Keys [Hkv, Dk, ROW_TILE] and values [Hkv, ROW_TILE, Dv] from `start` on, zeros behind the end."""
    k, v = (
        F.pad(x[start : start + ROW_TILE], (0, 0, 0, 0, 0, max(0, start + ROW_TILE - len(x))))
        for x in (k, v)
    )
    return k.permute(1, 2, 0).contiguous(), v.transpose(0, 1).contiguous()


def _attend_tile(
    q: Tensor,
    tiles: Sequence[tuple[Tensor, Tensor]],
    offset: int,
    length: int,
    causal: bool,
    params: AttentionParams,
) -> Tensor:
    """One tile of queries, [Hkv, group * QUERY_TILE, Dk], over tiles of rows: [.., Dv].

    offset: the first query's place among the rows. length: rows that exist; others are padding.
    """
    num_kv_heads, num_rows, _ = q.shape
    group = num_rows // QUERY_TILE
    if params.sinks is None:
        most = q.new_full((num_kv_heads, num_rows, 1), float("-inf"))
        total = q.new_zeros(num_kv_heads, num_rows, 1)
    else:  # one more logit, with a zero value
        sinks = params.sinks.to(q).view(num_kv_heads, group, 1)
        most = sinks.repeat_interleave(QUERY_TILE, 1)
        total = torch.ones_like(most)
    found = q.new_zeros(num_kv_heads, num_rows, tiles[0][1].shape[-1])
    for index, (keys, values) in enumerate(tiles):
        start = index * ROW_TILE
        seen = _seen(offset - start, length - start, causal, params.window, q.device)
        scores = torch.bmm(q, keys) * params.scale
        if params.softcap:
            scores = torch.tanh(scores / params.softcap) * params.softcap
        if seen is not None:
            scores = scores.masked_fill(~seen.repeat(group, 1), float("-inf"))
        higher = torch.maximum(most, scores.amax(-1, keepdim=True))
        level = higher.masked_fill(higher == float("-inf"), 0.0)  # nothing seen so far
        weights = torch.exp(scores - level)
        keep = torch.exp(most - level)
        total = total * keep + weights.sum(-1, keepdim=True)
        found = found * keep + torch.bmm(weights, values)
        most = higher
    return found / total


def _seen(
    offset: int, length: int, causal: bool, window: int | None, device: torch.device
) -> Tensor | None:
    """[QUERY_TILE, ROW_TILE] bool: which rows of a tile each query sees; None for all."""
    seen = visible(QUERY_TILE, ROW_TILE, offset=offset, causal=causal, window=window, device=device)
    if length >= ROW_TILE:
        return seen
    exists = (torch.arange(ROW_TILE, device=device) < length).expand(QUERY_TILE, -1)
    return exists if seen is None else seen & exists
