"""The counter of values that a layer's formats cannot hold."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.kv.codecs.conversion import per_head

SAMPLE_EVERY = 32
"""On a CPU, one step in SAMPLE_EVERY is checked; steps of PROMPT_ROWS rows always are."""
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
        rows: tuple[Tensor, Tensor | None],
        scales: tuple[Tensor | None, Tensor | None],
        slots: Tensor,
    ) -> None:
        """Counts values of K and V [T, num_kv_heads, head_dim] in a sample of steps, before they are written.

        For backends that do not count while they encode. Rows whose slot is -1 do not count.
        """
        self._writes += 1
        few = len(slots) < PROMPT_ROWS
        if not len(slots) or (few and self._writes % SAMPLE_EVERY != 1):
            return
        for side, (x, scale, largest) in enumerate(zip(rows, scales, self.largest, strict=True)):
            if largest is None or x is None:
                continue
            # The head with the smallest scale counts, as it is now: wrong scales are restored.
            bound = largest * (1.0 if scale is None else float(scale.min()))
            low, high = torch.aminmax(x)  # one pass; NaN is not at most anything
            if not max(-float(low), float(high)) <= bound:
                self.counts[side] += _beyond(x[slots >= 0], largest, scale)


def _beyond(x: Tensor, largest: float, scale: Tensor | None) -> Tensor:
    """Returns how many of x [T, num_kv_heads, head_dim] exceed `largest` times the scale."""
    size = x.to(torch.promote_types(x.dtype, torch.float32)).abs()
    bound = torch.full((1, 1), largest, dtype=torch.float32, device=x.device)
    return (size > (bound if scale is None else bound * per_head(scale))).sum()
