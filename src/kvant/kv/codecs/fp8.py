"""fp8_e4m3, fp8_e4m3fnuz and fp8_e5m2: 8-bit floats, with a scale from outside or with none.

code = nearest(x / scale), saturating; value = number(code) * scale. e5m2 has no scale: its range
(57344) needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec
from kvant.kv.codecs.conversion import narrow, per_head, widen
from kvant.kv.codecs.float8 import FLOAT8, Float8
from kvant.kv.format import KVFormat, ScalePlace


@dataclass(frozen=True, slots=True)
class ScaledFloat8Codec:
    """One scale for the layer's K or V, or one per KV head, from the checkpoint."""

    float8: Float8

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        return (self.float8.encode(widen(x) / per_head(scale)),)

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        (codes,) = planes
        return narrow(self.float8.decode(codes) * per_head(scale), dtype)


@dataclass(frozen=True, slots=True)
class PlainFloat8Codec:
    """No scale."""

    float8: Float8

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        assert scale is None
        return (self.float8.encode(widen(x)),)

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        (codes,) = planes
        return narrow(self.float8.decode(codes), dtype)


def codec(fmt: KVFormat) -> Codec:
    float8 = FLOAT8[fmt.encoding]
    if fmt.scale_place is ScalePlace.PARAMETER:
        return ScaledFloat8Codec(float8)
    return PlainFloat8Codec(float8)
