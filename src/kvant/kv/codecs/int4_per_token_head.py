"""int4_per_token_head: rotated rows in 4-bit steps, a scale and zero point per token and KV head.

    y      = rotate(x)                                     see kvant.kv.codecs.rotation
    lo, hi = min(min(y), 0), max(max(y), 0)                so that a constant row has a zero point
    scale  = max((hi - lo) / 15, 2^-126), rounded to 11 significant bits (half away from zero)
    zp     = clamp(nearest(-lo / scale), 0, 15)
    code   = clamp(nearest(y / scale) + zp, 0, 15)
    stored = the scale's float32 bits | zp                 its 13 low mantissa bits are 0 before
    value  = rotate((code - zp) * scale) / B

Eleven bits of scale make decoding exact: sums of up to 512 steps of at most 15 need 13 bits, and
13 + 11 = 24 is float32's significand. So every order of summation, with or without fused
multiply-add or as a matrix product, gives the same value. A row that contains NaN has scale NaN
(0x7fc00000) and codes 0, and decodes to NaN.

Format after vLLM's of the same name (zero point in the mantissa, adjacent packing, Hadamard), with
its own scale rule and with blocks where head_dim is no power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec, packed
from kvant.kv.codecs.conversion import narrow, row_scale, widen
from kvant.kv.codecs.rotation import rotate, unrotate
from kvant.kv.format import Encoding, KVFormat

STEPS = Encoding.UINT4.largest
ZERO_POINT_MASK = 0xF
DROPPED_BITS = 13


@dataclass(frozen=True, slots=True)
class RotatedInt4Codec:
    """Subclasses store a row's scale and zero point in another word."""

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        assert scale is None
        y = rotate(widen(x))
        low = y.amin(-1, keepdim=True).clamp_(max=0.0)
        high = y.amax(-1, keepdim=True).clamp_(min=0.0)
        scales = row_scale(high - low, STEPS)
        broken = scales.isnan()
        # Rows with NaN are encoded as rows of zeros, and get their scale back at the end.
        scales = self._rounded(scales.masked_fill(broken, 1.0))
        zero_point = (-low / scales).round_().clamp_(0.0, STEPS).masked_fill_(broken, 0.0)
        codes = (y / scales).round_().add_(zero_point).clamp_(0.0, STEPS)
        codes = codes.masked_fill_(broken, 0.0)
        return packed.pack(codes, 4), self._joined(scales, zero_point, broken)

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        return narrow(unrotate(self.decode_rotated(planes)), dtype)

    def decode_rotated(self, planes: Sequence[Tensor]) -> Tensor:
        """Returns the rows before the rotation is undone: float32 [.., head_dim], exact.

        For attention in rotated space: q . k = rotate(q) . decode_rotated / B, and a weighted sum
        of values needs `unrotate` once, on the result.
        """
        codes, stored = planes
        zero_point, scales = self.split(stored)
        numbers = torch.arange(16, dtype=torch.float32, device=codes.device)
        return packed.look_up(codes, numbers, 4).sub_(zero_point).mul_(scales)

    def split(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Splits the scale plane [.., 1] into zero points and scales, both float32 [.., 1]."""
        bits = stored.view(torch.int32)
        zero_point = (bits & ZERO_POINT_MASK).to(torch.float32)
        return zero_point, (bits & ~ZERO_POINT_MASK).view(torch.float32)

    def _rounded(self, scales: Tensor) -> Tensor:
        return round_scale(scales, DROPPED_BITS)

    def _joined(self, scales: Tensor, zero_point: Tensor, broken: Tensor) -> Tensor:
        """Returns the scale plane of scales [.., 1], rounded; broken rows have the scale NaN."""
        stored = (scales.view(torch.int32) | zero_point.to(torch.int32)).view(torch.float32)
        return torch.where(broken, float("nan"), stored)


def round_scale(scales: Tensor, dropped: int) -> Tensor:
    """Rounds scales [...], positive normal float32, to have `dropped` low bits of zero; ties upwards."""
    bits = (scales.view(torch.int32) + (1 << (dropped - 1))) & -(1 << dropped)
    return bits.view(torch.float32)


def codec(fmt: KVFormat) -> Codec:
    return RotatedInt4Codec()
