"""Check that scales still have their written values: a flipped bit changes every number that they scale.

Nothing writes to pages of the prefix cache, or to scales outside the pages after loading. So both can
be compared with checksums, which are cheap enough to compute while nothing runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.kv.format import Encoding, KVFormat, ScalePlace
from kvant.kv.pool import KVPool
from kvant.kv.spec import Role

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SPREAD = -0x61C8864680B583EB  # odd, from the golden ratio: weights that share no pattern


class ScaleAudit:
    """Checksums of the scales in pages, and copies of the scales outside them as loaded.

    pools: the pools that share page ids, the target's and the drafter's.
    page_bytes: bytes of scales in one page of the group that has the most; 0 if no format keeps scales there.
    """

    def __init__(self, pools: Sequence[KVPool]) -> None:
        self._groups: list[list[tuple[Tensor, Encoding]]] = [
            [] for _ in pools[0].arena.layout.of_tokens
        ]
        self._outside: list[tuple[str, Tensor, Tensor]] = []
        for pool, spec in [(one, spec) for one in pools for spec in one.plan.layers]:
            if spec.k is None:
                continue  # its owner's scales are checked
            cache = pool[spec.geometry.index]
            for side, choice, planes, scale in (
                ("K", spec.k, cache.k, cache.k_scale),
                ("V", spec.v, cache.v, cache.v_scale),
            ):
                if choice is not None:
                    group = pool.group_of(spec.geometry.index)
                    self._groups[group] += _scales(choice.dtype.format, planes)
                if scale is not None:
                    whose = "" if pool.plan.role is Role.TARGET else f"{pool.plan.role.value} "
                    label = f"the {side} scale of {whose}layer {spec.geometry.index}"
                    self._outside.append((label, scale, scale.clone()))
            wide = cache.wide
            if wide is not None:
                for choice, planes in ((wide.spec.k, wide.k), (wide.spec.v, wide.v)):
                    assert choice is not None
                    self._groups[cache.wide_group] += _scales(choice.dtype.format, planes)
        self.page_bytes = max(
            sum(p[0].numel() * p.element_size() for p, _ in planes) for planes in self._groups
        )

    def sums(self, pages: Sequence[int], group: int = 0) -> list[int | None]:
        """Returns a checksum per page of a group, over all its scales; None if one is NaN or infinite."""
        planes = self._groups[group]
        if not planes:
            return [0] * len(pages)
        device = planes[0][0].device
        index = torch.as_tensor(pages, device=device, dtype=torch.int64)
        total = torch.zeros(len(pages), dtype=torch.int64, device=device)
        sound = torch.ones(len(pages), dtype=torch.bool, device=device)
        before = 0
        for plane, encoding in planes:
            rows = plane.index_select(0, index).flatten(1)
            sound &= _are_numbers(rows, encoding).all(1)
            count = rows.shape[1]
            # Odd factors modulo 2**64: a difference in one place never becomes 0.
            places = torch.arange(before, before + count, device=device)
            words = rows.view(_INTEGER[rows.element_size()]).to(torch.int64)
            total += (words * ((2 * places + 1) * _SPREAD)).sum(1)
            before += count
        return [
            number if good else None
            for number, good in zip(total.tolist(), sound.tolist(), strict=True)
        ]

    def accept(self) -> None:
        """Compares scales outside the pages with their current values from now on."""
        for _, scale, loaded in self._outside:
            loaded.copy_(scale)

    def restore(self) -> list[str]:
        """Restores changed scales outside the pages to their loaded values; returns their names."""
        found = []
        for label, scale, loaded in self._outside:
            if not torch.equal(scale, loaded):  # NaN, too, equals nothing
                found.append(f"{label} was {scale.tolist()}, loaded was {loaded.tolist()}")
                scale.copy_(loaded)
        return found


def _scales(fmt: KVFormat, planes: Sequence[Tensor]) -> list[tuple[Tensor, Encoding]]:
    if fmt.scale_place is not ScalePlace.PLANE:
        return []
    assert fmt.scale_encoding is not None
    return [(planes[-1], fmt.scale_encoding)]  # codes come first


def _are_numbers(rows: Tensor, encoding: Encoding) -> Tensor:
    if encoding is Encoding.E4M3FN:
        return (rows & 0x7F) != 0x7F  # it has no infinities
    return torch.isfinite(rows)
