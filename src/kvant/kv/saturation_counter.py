"""The counter of values that a layer's formats cannot hold."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.kv.codecs.conversion import per_head

SAMPLE_EVERY = 32
"""On a CPU one step in so many is looked at; those of PROMPT_ROWS rows always."""
PROMPT_ROWS = 64


class SaturationCounter:
    """The count of one layer. counts: int64 [2], K and V, on the pool's device; kernels add to it.

    largest: of K and V, see `largest_stored`.
    """

    def __init__(self, counts: Tensor, largest: tuple[float | None, float | None]) -> None:
        self.counts = counts
        self.largest = largest
        self._writes = 0

    def sample(
        self,
        rows: tuple[Tensor, Tensor],
        scales: tuple[Tensor | None, Tensor | None],
        slots: Tensor,
    ) -> None:
        """Count in K and V [T, num_kv_heads, head_dim] that are about to be written, now and then.

        For backends that do not count while they encode. Rows whose slot is -1 do not count.
        """
        self._writes += 1
        few = len(slots) < PROMPT_ROWS
        if not len(slots) or (few and self._writes % SAMPLE_EVERY != 1):
            return
        for side, (x, scale, largest) in enumerate(zip(rows, scales, self.largest, strict=True)):
            if largest is None:
                continue
            # Of the head with the smallest scale, as it is now: scales that went wrong are put back.
            bound = largest * (1.0 if scale is None else float(scale.min()))
            low, high = torch.aminmax(x)  # one pass; NaN is not at most anything
            if not max(-float(low), float(high)) <= bound:
                self.counts[side] += _beyond(x[slots >= 0], largest, scale)


def _beyond(x: Tensor, largest: float, scale: Tensor | None) -> Tensor:
    """How many of x [T, num_kv_heads, head_dim] are beyond `largest` times the scale."""
    size = x.to(torch.promote_types(x.dtype, torch.float32)).abs()
    bound = torch.full((1, 1), largest, dtype=torch.float32, device=x.device)
    return (size > (bound if scale is None else bound * per_head(scale))).sum()
