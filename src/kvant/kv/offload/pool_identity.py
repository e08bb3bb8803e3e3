"""Fields of `PageIdentity` that follow from pools: of a rank's part, if a model is divided."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvant.kv.groups import ArenaLayout
from kvant.kv.identity import digest_of
from kvant.kv.pool import KVPool


def layout_of_pages(pools: Sequence[KVPool], page_size: int, rank: int, num_ranks: int) -> str:
    """Returns a digest of the place of each layer within a page, and whose part the page is."""
    whole = digest_of([page_size, *(_layout(pool.arena.layout) for pool in pools)])
    return whole if num_ranks == 1 else f"{whole} rank {rank} of {num_ranks}"


def scales_beside_pages(pools: Sequence[KVPool]) -> str:
    """Returns a digest of the scales and rounding matrices that are stored outside the pages."""
    found = hashlib.sha256()
    for pool in pools:
        for spec in pool.plan.layers:
            if spec.k is None:
                continue
            cache = pool[spec.geometry.index]
            for value in (cache.k_scale, cache.v_scale, cache.k_rounding):
                found.update(b"-" if value is None else value.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


def _layout(layout: ArenaLayout) -> list[object]:
    return [
        [
            group.window,
            group.page_bytes,
            group.sink,
            sorted((o.role.value, o.layer, o.is_wide, *at) for o, at in group.offsets.items()),
        ]
        for group in layout.groups
    ]
