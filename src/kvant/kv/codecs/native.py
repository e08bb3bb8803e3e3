"""float32, float16, bfloat16: numbers stored as they are, converted where the dtypes differ.

Always a real conversion of numbers, never a relabelling of bits, and saturating: 70000 in bfloat16
is 65504 in float16, not infinity. float32 keeps every number it is given, infinities included;
nothing is clamped to `CLAMP`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import TORCH_ELEMENT, Codec
from kvant.kv.codecs.conversion import narrow
from kvant.kv.format import KVFormat


@dataclass(frozen=True, slots=True)
class NativeCodec:
    dtype: torch.dtype

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        assert scale is None
        return (narrow(x, self.dtype),)

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        (stored,) = planes
        return narrow(stored, dtype)


def codec(fmt: KVFormat) -> Codec:
    return NativeCodec(TORCH_ELEMENT[fmt.element])
