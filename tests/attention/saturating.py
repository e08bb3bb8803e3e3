"""Rows with planted outliers through a backend's writer, and what the pool has counted then."""

from __future__ import annotations

import torch

from kvant.attention.base import AttentionBackend
from kvant.kv.dtype import KVDtype
from kvant.kv.pool import KVPool
from tests.attention import driver

SCALE = 0.25
LARGEST = {d: d.format.largest for d in KVDtype if d.format.largest is not None}
TOKENS = 20


def counted(
    backend: AttentionBackend, stored: KVDtype, *, rows: torch.dtype, device: str = "cpu"
) -> list[tuple[int, int, int]]:
    """(layer, values of K, of V) after TOKENS rows in which K has three outliers and V none.

    One of the three is in a row that is written nowhere. Layer 0 gets none.
    """
    geometries = [driver.layer(index=index, head_dim_k=64) for index in range(2)]
    plan = driver.plan(geometries, stored, fixed_scale=SCALE)
    pool = KVPool(plan, 4, device=torch.device(device), scales={})
    scale = SCALE if stored.format.takes_outside_scale else 1.0
    # A little below the largest, as bfloat16 rounds.
    most = 0.98 * scale * LARGEST.get(stored, 3e4)
    step = driver.step([[1, 2]], [TOKENS], [TOKENS], padding=1)
    moved = {name: getattr(step, name).to(device) for name in
             ("cu_seqlens_q", "seqlens_kv", "page_table", "slot_mapping", "positions")}  # fmt: skip
    step = type(step)(**moved, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS)
    v = torch.full((TOKENS + 1, 2, 64), most, dtype=rows, device=device)
    k = v.clone()
    backend.write(pool[0], k, v, step)
    k[3, 0, 7] *= -1.2
    k[TOKENS - 1, 1, 63] *= 1.2
    k[TOKENS, 1, 0] *= 1.2
    backend.write(pool[1], k, v, step)
    return [(one.spec.geometry.index, one.k, one.v) for one in pool.count_saturated()()]
