"""The storage behind page ids: one set of planes per layer.

One page id covers the same tokens in every layer, for any format; each layer's planes have their
own widths, so formats mix freely and page sizes need never divide each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvant.kv.checkpoint.facts import Side
from kvant.kv.codecs import TORCH_ELEMENT
from kvant.kv.saturation import Saturated, largest_stored
from kvant.kv.saturation_counter import SaturationCounter
from kvant.kv.spec import KVPlan, LayerSpec

SCRATCH_PAGE = 0
"""Page for writes of padding and warm-up; never handed out, never read by a request."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's storage.

    k, v: planes in the order of the format, each [num_pages, page_size, num_kv_heads, width];
    empty for a side that stores nothing (MLA's V).
    k_scale, v_scale: float32 [1] or [num_kv_heads], the scale outside the pages, or None.
    saturation: count of values beyond the range; None if no value can be beyond.
    """

    spec: LayerSpec
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    k_scale: Tensor | None
    v_scale: Tensor | None
    saturation: SaturationCounter | None = None

    @property
    def page_size(self) -> int:
        return self.k[0].shape[1]


class KVPool:
    """Planes of all layers of one plan, for `num_pages` pages (the scratch page counted).

    scales: values of the scales outside the pages by (layer index, side), float32 [1] or
    [num_kv_heads]; where a format takes one and none is given, the spec's fixed value is used.
    """

    def __init__(
        self,
        plan: KVPlan,
        num_pages: int,
        *,
        device: torch.device,
        scales: Mapping[tuple[int, Side], Tensor],
    ) -> None:
        self.plan = plan
        self.num_pages = num_pages
        self.device = device
        self._saturated = torch.zeros(len(plan.layers), 2, dtype=torch.int64, device=device)
        self._layers: dict[int, LayerCache] = {}
        for spec in plan.layers:
            if spec.k is not None:
                self._layers[spec.geometry.index] = self._allocate(spec, scales)
        for spec in plan.layers:
            owner = spec.geometry.shared_with
            if owner is not None:
                self._layers[spec.geometry.index] = self._layers[owner]

    def __getitem__(self, layer: int) -> LayerCache:
        """The storage that a layer reads: its own, or its owner's if it shares."""
        return self._layers[layer]

    @property
    def num_bytes(self) -> int:
        """Bytes actually allocated for pages."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes())

    def planes(self) -> list[Tensor]:
        """Every plane once, layers that share counted with their owner."""
        owned = {id(cache): cache for cache in self._layers.values()}.values()
        return [plane for cache in owned for plane in (*cache.k, *cache.v)]

    def saturated(self) -> tuple[Saturated, ...]:
        """Return layers with values beyond their range. Waits for the device."""
        counts = self._saturated.tolist()
        return tuple(
            Saturated(self.plan.role, spec, k, v)
            for spec, (k, v) in zip(self.plan.layers, counts, strict=True)
            if k or v
        )

    def refit(self, scales: Mapping[tuple[int, Side], Tensor]) -> None:
        """Replace scales outside the pages in place, by layer and side: float32 [1] or [num_kv_heads]."""
        for (layer, side), value in scales.items():
            cache = self._layers[layer]
            scale = cache.k_scale if side is Side.K else cache.v_scale
            assert scale is not None
            scale.copy_(value)

    def zero(self, pages: Sequence[int]) -> None:
        """Clear pages in every layer before they get a new owner.

        A recycled page may hold NaN bytes of its last owner, and masked attention multiplies them by 0.
        """
        index = torch.as_tensor(pages, device=self.device, dtype=torch.int64)
        for plane in self.planes():
            plane.index_fill_(0, index, 0)

    def _allocate(self, spec: LayerSpec, scales: Mapping[tuple[int, Side], Tensor]) -> LayerCache:
        g = spec.geometry
        shape = (self.num_pages, self.plan.page_size, g.num_kv_heads)
        planes: dict[str, list[Tensor]] = {"k": [], "v": []}
        for label, plane in spec.planes:
            planes[label[0]].append(
                zeros((*shape, plane.width), TORCH_ELEMENT[plane.element], self.device)
            )
        outside: list[Tensor | None] = []
        for side, choice in ((Side.K, spec.k), (Side.V, spec.v)):
            if choice is None or not choice.dtype.format.takes_outside_scale:
                outside.append(None)
                continue
            given = scales.get((g.index, side))
            value = torch.tensor([choice.scale.fixed]) if given is None else given
            outside.append(value.to(device=self.device, dtype=torch.float32))
        return LayerCache(
            spec, tuple(planes["k"]), tuple(planes["v"]), outside[0], outside[1],
            self._saturation(spec),
        )  # fmt: skip

    def _saturation(self, spec: LayerSpec) -> SaturationCounter | None:
        compute = self.plan.compute_dtype
        largest = largest_stored(spec.k, compute), largest_stored(spec.v, compute)
        if largest == (None, None):
            return None
        return SaturationCounter(self._saturated[spec.geometry.index], largest)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [*shape] of `dtype`; on a CPU in memory that the system allocates at first use.

    torch.zeros writes every byte, which takes seconds for a pool of gigabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
