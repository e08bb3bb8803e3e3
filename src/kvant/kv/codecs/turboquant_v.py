"""turboquant_v4 and turboquant_v3: steps from the row's smallest number on, two float16 a row.

    min    = float16(smallest of x), saturating; never -0
    scale  = float16((largest of x - min) / (2^bits - 1)), at least 0, saturating; never -0
    code   = clamp(nearest((x - min) / scale), 0, 2^bits - 1); 0 where scale is 0
    value  = code * scale + min

code * scale is exact in float32, so that a fused multiply-add gives the same value. Scale and minimum
lie beside each other, scale first. A row that contains NaN has scale NaN (0x7e00), minimum 0 and
codes 0. Not rotated. Format after vLLM's turboquant_*, whose rounding differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec, packed
from kvant.kv.codecs.conversion import divide, narrow, widen
from kvant.kv.format import KVFormat

_HALF_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class SmallestFirstCodec:
    bits: int

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        assert scale is None
        x = widen(x)
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        broken = low.isnan()
        low = _half(low.masked_fill(broken, 0.0)) + 0.0  # never -0
        steps = float((1 << self.bits) - 1)
        span = (high - low.to(torch.float32)).masked_fill(broken, 0.0).clamp_(min=0.0)
        step = _half(divide(span, steps)) + 0.0
        codes = ((x - low.to(torch.float32)) / step.to(torch.float32)).round_().clamp_(0.0, steps)
        codes = codes.masked_fill_((step == 0) | broken, 0.0)
        step = step.masked_fill_(broken, float("nan"))
        return packed.pack(codes, self.bits), torch.cat((step, low), dim=-1)

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        codes, scales = planes
        step, low = scales.to(torch.float32).unbind(-1)
        numbers = torch.arange(1 << self.bits, dtype=torch.float32, device=codes.device)
        found = packed.look_up(codes, numbers, self.bits)
        return narrow(found * step.unsqueeze(-1) + low.unsqueeze(-1), dtype)


def _half(x: Tensor) -> Tensor:
    return x.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


def codec(fmt: KVFormat) -> Codec:
    return SmallestFirstCodec(fmt.bits)
