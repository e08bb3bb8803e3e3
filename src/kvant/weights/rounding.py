"""Activations in 8-bit floats: how they are rounded, and rows that are already rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Activations [T, columns] as products of 8-bit floats read them.

    codes: [T, columns] float8_e4m3fn. scales: float32, [T, 1] per row, [T, columns / group] per group of a
    row, [1] for all numbers. dtype: of the activations before rounding, and of products with them. fast_sums:
    tensor cores may add products in fewer bits than float32 has; weights in blocks are added in float32.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    fast_sums: bool = False

    def __len__(self) -> int:
        return len(self.codes)


Rows = Tensor | RoundedRows
"""Activations [T, columns], rounded or not."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How activations are rounded to e4m3; see `kvant.weights.codecs.round_rows`.

    group: neighbours in a row that share a scale; 0 for the whole row. scale: float32 [1], the scale of all
    numbers, or None to compute scales per row or group. fast_sums: see `RoundedRows`.
    """

    group: int = 0
    scale: Tensor | None = None
    fast_sums: bool = False

    @property
    def is_by_row(self) -> bool:
        """Whether a scale depends on all numbers of a row."""
        return self.scale is None and not self.group

    def empty(self, x: Tensor) -> RoundedRows:
        """Returns uninitialised codes and scales for x [T, columns]; a given scale is used as it is."""
        tokens, columns = x.shape
        codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = self.scale
        if scales is None:
            count = columns // self.group if self.group else 1
            scales = torch.empty(tokens, count, dtype=torch.float32, device=x.device)
        return RoundedRows(codes, scales, x.dtype, self.fast_sums)
