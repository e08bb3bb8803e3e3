"""The storage behind page ids: an arena of bytes, and the planes of every layer as views of it.

One page id covers the same tokens in every layer of a group, for any format; each layer's planes have
their own widths, so formats mix freely. `kvant.kv.groups` decides where pages and planes lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvant.errors import EngineFault
from kvant.kernels.transfer import to_host
from kvant.kv.codecs import TORCH_ELEMENT
from kvant.kv.format import Plane, Side
from kvant.kv.groups import ArenaLayout, Owner, lay_out
from kvant.kv.saturation import Saturated, largest_stored
from kvant.kv.saturation_counter import SaturationCounter
from kvant.kv.spec import Choice, KVPlan, LayerSpec, Role, ScaleState, WideRows

SCRATCH_PAGE = 0
"""Page for writes of padding and warm-up; never handed out, never read by a request."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's storage.

    k, v: planes in the order of the format, each [num_pages, page_size, num_kv_heads, width]; empty for a
    side that stores nothing (MLA's V). Pages of all planes are `page_stride` bytes apart, a multiple of 16.
    k_scale, v_scale: float32 [1] or [num_kv_heads], the scale outside the pages, or None.
    k_rounding: float32 [num_kv_heads, head_dim_k, head_dim_k], matrices that keys are rounded with, or None.
    saturation: count of values beyond the range; None if no value can be beyond.
    wide: storage of its wide rows (`LayerSpec.wide`), whose pages `wide_group` addresses; None without.
    """

    spec: LayerSpec
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    k_scale: Tensor | None
    v_scale: Tensor | None
    saturation: SaturationCounter | None = None
    k_rounding: Tensor | None = None
    wide: LayerCache | None = None
    wide_group: int = 0

    @property
    def k_outside(self) -> Tensor | None:
        """What encoding keys takes from outside the pages: a scale, matrices, or nothing."""
        return self.k_scale if self.k_rounding is None else self.k_rounding

    @property
    def page_size(self) -> int:
        return self.k[0].shape[1]

    @property
    def page_stride(self) -> int:
        """Bytes from a page to the next one."""
        return self.k[0].stride(0) * self.k[0].element_size()


class Arena:
    """The bytes of all pages, zeros at first.

    num_superblocks: the scratch pages' superblock counted, which is the first one.
    """

    def __init__(self, layout: ArenaLayout, num_superblocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_superblocks = num_superblocks
        self.device = device
        self.bytes = zeros((num_superblocks * layout.superblock_bytes,), torch.uint8, device)

    @property
    def is_shared(self) -> bool:
        """Whether pages of several groups lie in it, each of them in one piece."""
        return len(self.layout.groups) > 1

    def num_pages(self, group: int) -> int:
        """Page ids of a group, all of the arena's bytes as its pages."""
        return self.num_superblocks * self.layout.groups[group].per_superblock

    def pieces(self, group: int) -> list[Tensor]:
        """Returns a group's pages as bytes: uint8 [num_pages, n] views, one for each piece of a page."""
        held, count = self.layout.groups[group], self.num_pages(group)
        if self.is_shared:
            return [self.bytes.view(count, held.page_bytes)]
        return [
            self.bytes[first * count : end * count].view(count, end - first)
            for first, end in held.pieces.values()
        ]

    def planes(self, spec: LayerSpec, owner: Owner) -> list[Tensor]:
        """Planes of a layer by `spec.planes`, views [num_pages, page_size, num_kv_heads, width]."""
        place = self.layout.group_of(owner)
        group, heads = self.layout.groups[place], spec.geometry.num_kv_heads
        count, stride, moved = self.num_pages(place), group.page_bytes, 0
        if not self.is_shared:
            first, end = group.pieces[owner]
            stride, moved = end - first, first * (count - 1)
        shape = self.layout.page_size, heads
        return [
            self._plane(plane, (count, *shape, plane.width), stride, moved + offset)
            for (_, plane), offset in zip(spec.planes, group.offsets[owner], strict=True)
        ]

    def state_planes(self, spec: LayerSpec, role: Role) -> list[list[Tensor]]:
        """Returns the planes of each of a layer's states, views [num_pages, *shape[:-1], width].

        Pages of states lie in one piece, which begins at a multiple of `page_bytes`.
        """
        place = len(self.layout.groups) - 1
        group, count = self.layout.groups[place], self.num_pages(place)
        offsets = iter(group.offsets[Owner(role, spec.geometry.index)])
        return [
            [
                self._plane(
                    plane,
                    (count, *state.geometry.shape[:-1], plane.width),
                    group.page_bytes,
                    next(offsets),
                )
                for plane in state.planes
            ]
            for state in spec.states
        ]

    def _plane(self, plane: Plane, shape: tuple[int, ...], stride: int, offset: int) -> Tensor:
        """Returns a view of the bytes from `offset` on, whose first dimension is `stride` bytes apart."""
        typed = self.bytes.view(TORCH_ELEMENT[plane.element])
        size = typed.element_size()
        strides = [1]
        for length in reversed(shape[2:]):
            strides.insert(0, strides[0] * length)
        at = int(typed.storage_offset()) + offset // size
        return typed.as_strided(shape, (stride // size, *strides), at)

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """Clears pages of each group before they get a new owner.

        A recycled page may hold NaN bytes of its last owner, and masked attention multiplies them by 0.
        """
        for group, some in enumerate(
            pages
        ):  # not those of states, which nothing reads before it writes them
            if some:
                index = torch.as_tensor(some, device=self.device, dtype=torch.int64)
                for piece in self.pieces(group):
                    piece.index_fill_(0, index, 0)


class KVPool:
    """Planes of all layers of one plan, in an arena.

    pages: the arena, which may hold other plans' layers too; or the number of pages (the scratch page
    counted) of an arena for this plan alone, in which every page holds all layers.
    scales: values of the scales outside the pages by (layer index, side), float32 [1] or
    [num_kv_heads]; where a format takes one and none is given, the spec's fixed value is used. For keys of
    a format with feedback: its matrices [num_kv_heads, head_dim, head_dim].
    """

    def __init__(
        self,
        plan: KVPlan,
        pages: int | Arena,
        *,
        device: torch.device,
        scales: Mapping[tuple[int, Side], Tensor],
    ) -> None:
        self.plan = plan
        self.device = device
        if not isinstance(pages, Arena):
            pages = Arena(lay_out(plan, windows=False), pages, device)
        self.arena = pages
        self._saturated = torch.zeros(len(plan.layers), 2, dtype=torch.int64, device=device)
        self._layers: dict[int, LayerCache] = {}
        self._groups: dict[int, int] = {}
        for spec in plan.layers:
            if spec.k is not None:
                owner = Owner(plan.role, spec.geometry.index)
                self._layers[spec.geometry.index] = self._allocate(spec, owner, scales)
                self._groups[spec.geometry.index] = self.arena.layout.group_of(owner)
        for spec in plan.layers:
            shared = spec.geometry.shared_with
            if shared is not None:
                self._layers[spec.geometry.index] = self._layers[shared]
                self._groups[spec.geometry.index] = self._groups[shared]

    def __getitem__(self, layer: int) -> LayerCache:
        """Returns the storage that a layer reads: its own, or its owner's if it shares."""
        return self._layers[layer]

    @property
    def num_pages(self) -> int:
        """Page ids of the first group, the scratch page counted."""
        return self.arena.num_pages(0)

    @property
    def num_bytes(self) -> int:
        """Bytes actually allocated for pages, those of other plans in the arena included."""
        return self.arena.bytes.numel()

    def planes(self) -> list[Tensor]:
        """Returns every plane once, layers that share counted with their owner."""
        owned = {id(cache): cache for cache in self._layers.values()}.values()
        wide = [cache.wide for cache in owned if cache.wide is not None]
        return [plane for cache in (*owned, *wide) for plane in (*cache.k, *cache.v)]

    def count_saturated(self) -> Callable[[], tuple[Saturated, ...]]:
        """Begins to read which layers have values beyond their range; the result waits for them.

        A call of the result after the next step waits for nothing.
        """
        counted = to_host(self._saturated)

        def read() -> tuple[Saturated, ...]:
            return tuple(
                Saturated(self.plan.role, spec, k, v)
                for spec, (k, v) in zip(self.plan.layers, counted().tolist(), strict=True)
                if k or v
            )

        return read

    def refit(self, scales: Mapping[tuple[int, Side], Tensor]) -> None:
        """Replaces scales outside the pages in place, by layer and side: float32 [1] or [num_kv_heads]."""
        for (layer, side), value in scales.items():
            cache = self._layers[layer]
            scale = cache.k_outside if side is Side.K else cache.v_scale
            assert scale is not None
            scale.copy_(value)

    def zero(self, pages: Sequence[int]) -> None:
        """Clears pages of the first group in every layer of it. See `Arena.zero`."""
        self.arena.zero([pages])

    def group_of(self, layer: int) -> int:
        """The group whose page ids address what a layer reads."""
        return self._groups[layer]

    def _allocate(
        self,
        spec: LayerSpec,
        owner: Owner,
        scales: Mapping[tuple[int, Side], Tensor],
        rows: WideRows | None = None,
    ) -> LayerCache:
        """Returns the storage of a layer, or of its wide rows, where `rows` says which sides are wide."""
        g = spec.geometry
        planes: dict[str, list[Tensor]] = {"k": [], "v": []}
        found = self.arena.planes(spec, owner)
        for (label, _), plane in zip(spec.planes, found, strict=True):
            planes[label[0]].append(plane)
        outside: list[Tensor | None] = []
        for side, choice in ((Side.K, spec.k), (Side.V, spec.v)):
            if choice is None or not choice.dtype.format.takes_outside_scale:
                outside.append(None)
                continue
            given = scales.get((g.index, side))
            value = torch.tensor([choice.scale.fixed]) if given is None else given
            outside.append(value.to(device=self.device, dtype=torch.float32))
        rounding = self._rounding(spec, scales)
        wide, group = None, 0
        if spec.wide_spec is not None:
            wide_owner = owner._replace(is_wide=True)
            # Tensors that are here already are not copied: both forms of a side that is not wide share them.
            beside = (
                (Side.K, rounding if outside[0] is None else outside[0]),
                (Side.V, outside[1]),
            )
            shared = {(g.index, side): one for side, one in beside if one is not None}
            wide = self._allocate(spec.wide_spec, wide_owner, shared, spec.wide)
            group = self.arena.layout.group_of(wide_owner)
        counted = (spec.k, spec.v) if rows is None else (rows.k, rows.v)
        return LayerCache(
            spec, tuple(planes["k"]), tuple(planes["v"]), outside[0], outside[1],
            self._saturation(g.index, *counted), rounding, wide, group,
        )  # fmt: skip

    def _rounding(
        self, spec: LayerSpec, scales: Mapping[tuple[int, Side], Tensor]
    ) -> Tensor | None:
        assert spec.k is not None
        if not spec.k.dtype.format.takes_rounding:
            return None
        given = scales.get((spec.geometry.index, Side.K))
        if given is None:
            if spec.k.scale.state is ScaleState.FOUND:
                raise EngineFault(f"the rounding matrices of {spec.geometry.name} were not loaded")
            return None
        return given.to(device=self.device, dtype=torch.float32).contiguous()

    def _saturation(
        self, layer: int, k: Choice | None, v: Choice | None
    ) -> SaturationCounter | None:
        compute = self.plan.compute_dtype
        largest = largest_stored(k, compute), largest_stored(v, compute)
        if largest == (None, None):
            return None
        return SaturationCounter(self._saturated[layer], largest)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros [*shape] of `dtype`; on a CPU in memory that the system allocates at first use.

    torch.zeros writes every byte, which takes seconds for a pool of gigabytes. They begin at a multiple
    of 64, where a kernel may load whole lines.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    room = torch.from_numpy(np.zeros(num_bytes + 64, np.uint8))
    first = -room.data_ptr() % 64
    return room[first : first + num_bytes].view(dtype).view(shape)
