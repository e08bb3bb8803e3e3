"""normal2: rotated rows in four equal steps that are best for normal numbers, a float16 scale per row.

    z      = a rotated row of about standard normal numbers, as turboquant_k3 has it
    code   = 2 + (z > 255/256)  where z >= 0,  1 - (-z > 255/256)  elsewhere
    number = code - 1.5
    scale  = float16((r / sqrt(sum of number^2)) * u), saturating at 65504
    value  = rotate(number * scale) / B

r, u, sums of squares and rows with NaN: see `kvant.kv.codecs.turboquant_k`. A row of zeros has scale 0 and
codes 2. Four equal steps lose 1 % more than the best codebook of four numbers, and decode without a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec, packed
from kvant.kv.codecs.conversion import narrow
from kvant.kv.codecs.rotation import unrotate
from kvant.kv.codecs.turboquant_k import normalised, scale_of
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
        scales = scale_of(row, codes - BIAS)
        return packed.pack(codes.masked_fill_(row.broken, 0.0), 2), scales

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        codes, scales = planes
        numbers = torch.arange(4, dtype=torch.float32, device=codes.device) - BIAS
        found = packed.look_up(codes, numbers, 2) * scales.to(torch.float32)
        return narrow(unrotate(found + 0.0), dtype)  # zeroed bytes become 0, not -0


def codec(fmt: KVFormat) -> Codec:
    return FourStepsCodec()
