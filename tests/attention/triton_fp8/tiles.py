"""Long stretches of queries as an fp8 kernel computes them: tile by tile, rounded by torch's casts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.attention.base import AttentionParams, LongQuery, Step
from kvant.kv.dtype import KVDtype
from kvant.kv.pool import LayerCache
from kvant.kv.spec import Choice

TILE = 128
E4M3 = torch.float8_e4m3fn
CODES = {
    KVDtype.FP8_E4M3: E4M3,
    KVDtype.FP8_E5M2: torch.float8_e5m2,
    KVDtype.FP8_PER_TOKEN_HEAD: E4M3,
}


@dataclass
class Tiles:
    """An `attend_long`. It can be made wrong: what it rounds, and how many keys too many each query sees."""

    rounds_queries: bool = True
    rounds_weights: bool = True
    ahead: int = 0
    calls: int = 0

    def __call__(
        self, cache: LayerCache, q: Tensor, out: Tensor, step: Step, params: AttentionParams
    ) -> None:
        self.calls += 1
        for one in step.long:
            rows = slice(one.first_token, one.first_token + one.num_tokens)
            out[rows] = self._attend(cache, q[rows].float(), step, params, one).to(out.dtype)

    def _attend(
        self, cache: LayerCache, q: Tensor, step: Step, params: AttentionParams, one: LongQuery
    ) -> Tensor:
        g = cache.spec.geometry
        slots = [
            int(step.page_table[one.sequence, i // cache.page_size]) * cache.page_size
            + i % cache.page_size
            for i in range(one.length)
        ]
        k, k_row, k_all = _codes(cache.k, cache.spec.k, cache.k_scale, slots, g.num_kv_heads)
        v, v_row, v_all = _codes(cache.v, cache.spec.v, cache.v_scale, slots, g.num_kv_heads)
        last = torch.arange(one.length - one.num_tokens, one.length)[:, None] + self.ahead
        found = torch.empty(one.num_tokens, g.num_q_heads, g.head_dim_v)
        for head in range(g.num_q_heads):
            kv = head * g.num_kv_heads // g.num_q_heads
            x = q[:, head]
            lift = torch.exp2(8 - torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True))))
            if self.rounds_queries:
                x = (x * lift).to(E4M3).float() / lift
            level = torch.full((len(x), 1), -1e30)
            sums, weighed = torch.zeros(len(x), g.head_dim_v), torch.zeros(len(x), 1)
            for start in range(0, one.length, TILE):
                at = slice(start, start + TILE)
                score = x @ k[at, kv].T * (k_row[at, kv] * k_all[kv] * params.scale * 1.442695041)
                if step.causal:
                    score = score.masked_fill(torch.arange(one.length)[at] > last, -torch.inf)
                higher = torch.maximum(level, score.amax(-1, keepdim=True).ceil())
                p = torch.exp2(score - higher + 8)
                fade = torch.exp2(level - higher)
                level, weighed = higher, weighed * fade + p.sum(-1, keepdim=True)
                unit = torch.exp2(torch.ceil(torch.log2(v_row[at, kv].max())))
                w = p * (v_row[at, kv] / unit)
                if self.rounds_weights:
                    w = w.to(E4M3).float()
                sums = sums * fade + w @ v[at, kv] * unit
            found[:, head] = sums / weighed * v_all[kv]
        return found


def _codes(
    planes: tuple[Tensor, ...],
    choice: Choice | None,
    scale: Tensor | None,
    slots: list[int],
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as numbers [m, heads, d], scales of rows [m, heads] and of heads [heads]."""
    assert choice is not None
    codes, *scales = (plane.flatten(0, 1)[slots] for plane in planes)
    rows = scales[0][..., 0] if scales else torch.ones(len(slots), heads)
    every = torch.ones(heads) if scale is None else scale.expand(heads)
    return codes.view(CODES[choice.dtype]).float(), rows, every
