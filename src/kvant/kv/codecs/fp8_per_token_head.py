"""fp8_per_token_head: e4m3 codes and a float32 scale for each token and KV head.

scale = max(absmax(row) / 448, 2^-126); code = nearest(x / scale); value = number(code) * scale.
A row that contains NaN has scale NaN and decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec
from kvant.kv.codecs.conversion import narrow, row_scale, widen
from kvant.kv.codecs.float8 import FLOAT8, Float8
from kvant.kv.format import KVFormat


@dataclass(frozen=True, slots=True)
class RowScaledFloat8Codec:
    float8: Float8

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        assert scale is None
        x = widen(x)
        scales = row_scale(x.abs().amax(-1, keepdim=True), self.float8.max)
        return self.float8.encode(x / scales), scales

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        codes, scales = planes
        return narrow(self.float8.decode(codes).mul_(scales), dtype)


def codec(fmt: KVFormat) -> Codec:
    return RowScaledFloat8Codec(FLOAT8[fmt.encoding])
