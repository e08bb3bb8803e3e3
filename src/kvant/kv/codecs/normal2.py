"""normal2: rotated rows in four equal steps that are best for normal numbers, a float16 scale per row.

    z      = a rotated row of about standard normal numbers, as turboquant_k3 has it
    code   = 2 + (z > 255/256)  where z >= 0,  1 - (-z > 255/256)  elsewhere
    number = code - 1.5
    scale  = float16((2 r sqrt(D) / sum of |z| * (3 where |z| > 255/256, else 1)) * u), saturating at 65504
    value  = rotate(number * scale) / B

r, u, the order of sums and rows with NaN: see `kvant.kv.codecs.turboquant_k`. A row of zeros has scale 0 and
codes 2. Four equal steps lose 1 % more than the best codebook of four numbers, and decode without a table.

With this scale the product of a row and its decoded row is the row's squared length, so the error has no
part along the row. A decoded row of the same length, or with the least squared error, is too short along the
row by 6 or 12 %, and sums of many values keep that error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec, packed
from kvant.kv.codecs.conversion import narrow
from kvant.kv.codecs.rotation import unrotate
from kvant.kv.codecs.turboquant_k import (
    Normalised,
    half_scales,
    normalised,
    root_of_width,
    sum_in_pairs,
)
from kvant.kv.format import KVFormat

BOUND = 255 / 256
"""Magnitude of a normal number above which the outer step is nearer; half of the best step is 0.498."""
BIAS = 1.5


@dataclass(frozen=True, slots=True)
class FourStepsCodec:
    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        assert scale is None
        row = normalised(x)
        outer = (row.z.abs() > BOUND).to(torch.float32)
        codes = torch.where(row.z < 0, 1 - outer, 2 + outer)
        scales = _scale_of(row, outer)
        return packed.pack(codes.masked_fill_(row.broken, 0.0), 2), scales

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        codes, scales = planes
        numbers = torch.arange(4, dtype=torch.float32, device=codes.device) - BIAS
        found = packed.look_up(codes, numbers, 2) * scales.to(torch.float32)
        return narrow(unrotate(found + 0.0), dtype)  # zeroed bytes become 0, not -0


def _scale_of(row: Normalised, outer: Tensor) -> Tensor:
    """Returns float16 scales [.., 1]. outer: float32 [.., head_dim], 1 for the outer steps, else 0."""
    sums = sum_in_pairs(row.z.abs() * (1 + 2 * outer))
    lengths = (row.root * root_of_width(outer) * 2) / sums.masked_fill(row.root == 0, 1.0)
    return half_scales(lengths * row.unit, row.broken)


def codec(fmt: KVFormat) -> Codec:
    return FourStepsCodec()
