"""Pages in host memory as layers, sides and planes; and pages of one engine as those of another.

A converted page is decoded by the codec that defines its format, and encoded by the codec of the engine's
own: what was stored is rounded once more. The result is that of `codec.encode(codec.decode(page))`, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvant.kv.codecs import TORCH_ELEMENT, codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.groups import STATES, Owner, PageGroup
from kvant.kv.identity import PageIdentity
from kvant.kv.offload.mover import HostRows
from kvant.kv.offload.moves import Key
from kvant.kv.pool import KVPool, LayerCache
from kvant.kv.spec import Choice, Role
from kvant.kv.transfer.measured import conversion_kl
from kvant.kv.transfer.messages import GroupRows, LayerRows, Part, SideRows, Welcome
from kvant.kv.transfer.taker import UNCHANGED, IncompatiblePages

_BY_NAME = {dtype.format.name: dtype for dtype in KVDtype}


def groups_of(pools: Sequence[KVPool], rows: HostRows) -> list[GroupRows]:
    """Returns how pages of each group lie in host memory, without drafters, wide rows and states."""
    layout, target = pools[0].arena.layout, pools[0]
    return [
        GroupRows(
            group.window,
            rows.row_bytes[place],
            rows.stride(place),
            [_layer_rows(target[owner.layer], found) for owner, found in _owners(group)],
        )
        for place, group in enumerate(layout.groups)
    ]


class CodecConverter:
    """Converts pages to those of `pools`, one pool of a model without drafter.

    formats: that may be converted. groups: of this engine. fingerprint: of the model's geometry, to say what
    the conversion loses.
    """

    def __init__(
        self, pools: Sequence[KVPool], groups: Sequence[GroupRows], page_size: int,
        formats: frozenset[KVDtype], fingerprint: str = "",
    ) -> None:  # fmt: skip
        self._fingerprint = fingerprint
        self._formats = frozenset(dtype.format.name for dtype in formats)
        self._groups, self._page_size = groups, page_size
        self._pool = pools[0]
        self._whole = (
            len(pools) == 1
            and all(spec.wide is None for spec in pools[0].plan.layers)
            and all(group.window != STATES for group in groups)
        )

    @property
    def formats(self) -> frozenset[str]:
        return self._formats

    def check(self, mine: Sequence[Part], theirs: Welcome) -> str:
        for own, part in zip(mine, theirs.parts, strict=True):
            difference = PageIdentity(**own.identity).difference(part.identity, UNCHANGED)
            if difference is not None:
                raise IncompatiblePages(f"{difference}; no conversion changes that")
        if theirs.page_size != self._page_size:
            raise IncompatiblePages(
                f"its pages hold {theirs.page_size} tokens, here they hold {self._page_size}: "
                "give both engines the same --page-size"
            )
        if not self._whole:
            raise IncompatiblePages("pages of drafters, wide rows and states are not converted")
        changes: dict[tuple[str, str], bool] = {}
        for own, part in zip(mine, theirs.parts, strict=True):
            for change, has_scales in self._changes(own.groups, part.groups):
                changes[change] = changes.get(change, False) or has_scales
        said = ", ".join(f"{a} becomes {b}" for a, b in changes)
        ((source, target), has_scales), *more = changes.items()
        is_known = not more and not has_scales
        loss = conversion_kl(self._fingerprint if is_known else "", source, target)
        return f", converted: {said} ({loss})"

    def _changes(
        self, mine: Sequence[GroupRows], theirs: Sequence[GroupRows]
    ) -> Iterator[tuple[tuple[str, str], bool]]:
        """Yields the formats of each converted side, and whether either has scales other than 1.

        Raises IncompatiblePages.
        """
        if len(theirs) != len(mine):
            raise IncompatiblePages("its layers lie in other groups of pages")
        for their_group, group in zip(theirs, mine, strict=True):
            shapes = [
                [(x.index, x.num_kv_heads, x.head_dim_k, x.head_dim_v) for x in one.layers]
                for one in (their_group, group)
            ]
            if shapes[0] != shapes[1] or their_group.window != group.window:
                raise IncompatiblePages(
                    "its layers lie in other groups of pages, or have other heads"
                )
            for theirs_layer, layer in zip(their_group.layers, group.layers, strict=True):
                for a, b in zip(_sides(theirs_layer), _sides(layer), strict=True):
                    if a.format not in self._formats:
                        raise IncompatiblePages(
                            f"its format {a.format} is not among the converted ones "
                            f"(--kv-transfer-convert {','.join(sorted(self._formats))})"
                        )
                    scales = (*(a.scale or ()), *(b.scale or ()))
                    yield (a.format, b.format), any(value != 1 for value in scales)

    def convert(
        self, theirs: Sequence[GroupRows], key: Key, row: memoryview, into: memoryview
    ) -> None:
        source = torch.from_numpy(np.frombuffer(row, np.uint8))
        target = torch.from_numpy(np.frombuffer(into, np.uint8))
        target.zero_()
        group = key.group
        pairs = zip(theirs[group].layers, self._groups[group].layers, strict=True)
        for there, here in pairs:
            cache = self._pool[here.index]
            outside = (cache.k_outside, cache.v_scale)
            heads = here.num_kv_heads
            dims = (here.head_dim_k, here.head_dim_v)
            sides = zip(_sides(there), _sides(here), dims, outside, strict=False)
            for side, own, head_dim, value in sides:
                rows = _decode(source, side, self._page_size, heads, head_dim)
                dtype = _BY_NAME[own.format]
                encoded = codec_for(dtype).encode(rows, None if value is None else value.cpu())
                planes = _planes(target, own, self._page_size, heads, head_dim)
                for plane, new in zip(planes, encoded, strict=True):
                    plane.copy_(new.view(plane.dtype) if new.dtype != plane.dtype else new)


def _decode(memory: Tensor, side: SideRows, page_size: int, heads: int, head_dim: int) -> Tensor:
    """[page_size, heads, head_dim] float32 of a page, `memory` uint8."""
    scale = None if side.scale is None else torch.tensor(side.scale, dtype=torch.float32)
    planes = _planes(memory, side, page_size, heads, head_dim)
    return codec_for(_BY_NAME[side.format]).decode(planes, scale, torch.float32)


def _planes(
    memory: Tensor, side: SideRows, page_size: int, heads: int, head_dim: int
) -> list[Tensor]:
    """Views [page_size, heads, width] of a page, `memory` uint8."""
    found = []
    for plane, first in zip(
        _BY_NAME[side.format].format.planes(head_dim), side.offsets, strict=True
    ):
        size = page_size * heads * plane.row_bytes
        typed = memory[first : first + size].view(TORCH_ELEMENT[plane.element])
        found.append(typed.view(page_size, heads, plane.width))
    return found


def _sides(layer: LayerRows) -> list[SideRows]:
    return [layer.k] if layer.v is None else [layer.k, layer.v]


def _owners(group: PageGroup) -> Iterator[tuple[Owner, Sequence[int]]]:
    for owner, found in group.offsets.items():
        if group.window == STATES:
            return
        if owner.role is Role.TARGET and not owner.is_wide:
            yield owner, found


def _layer_rows(cache: LayerCache, offsets: Sequence[int]) -> LayerRows:
    spec = cache.spec
    g = spec.geometry
    assert spec.k is not None
    count = sum(label[0] == "k" for label, _ in spec.planes)
    v = None if spec.v is None else _side(spec.v, offsets[count:], cache.v_scale)
    return LayerRows(
        g.index, g.num_kv_heads, g.head_dim_k, g.head_dim_v,
        _side(spec.k, offsets[:count], cache.k_scale), v,
    )  # fmt: skip


def _side(choice: Choice, offsets: Sequence[int], scale: Tensor | None) -> SideRows:
    values = None if scale is None else scale.flatten().tolist()
    return SideRows(choice.dtype.format.name, list(offsets), values)
