"""int4_short: int4_per_token_head with scale and zero point in 16 bits instead of 32.

    stored = 6 bits of exponent, 6 of mantissa, 4 of zero point, the highest first
    scale  = (1 + mantissa / 64) * 2^(exponent - 41)

The scale has 7 significant bits, ties upwards, and is within 2^-41 .. 2^22 * (1 + 62 / 64). Everything else
is int4_per_token_head's. A row that contains NaN is stored as 0xfff0 and codes 0. Words from 0xfff0 on
decode to NaN, zeroed bytes to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec
from kvant.kv.codecs.int4_per_token_head import RotatedInt4Codec, round_scale
from kvant.kv.format import Encoding, KVFormat

DROPPED_BITS = 17
LEAST_SCALE = 2.0**-41
LARGEST_SCALE = Encoding.SHORT.largest
OFFSET = 86 << 6
"""The upper 12 bits of float32's LEAST_SCALE, without the sign: they are stored as 0."""
NAN_WORD = 0xFFF0


@dataclass(frozen=True, slots=True)
class ShortInt4Codec(RotatedInt4Codec):
    def split(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Splits the int16 words [.., 1] into zero points and scales, both float32 [.., 1]."""
        word = stored.to(torch.int32) & 0xFFFF
        scales = (((word >> 4) + OFFSET) << DROPPED_BITS).view(torch.float32)
        return (word & 15).to(torch.float32), scales.masked_fill(word >= NAN_WORD, float("nan"))

    def _rounded(self, scales: Tensor) -> Tensor:
        return round_scale(scales.clamp(LEAST_SCALE, LARGEST_SCALE), DROPPED_BITS)

    def _joined(self, scales: Tensor, zero_point: Tensor, broken: Tensor) -> Tensor:
        word = ((scales.view(torch.int32) >> DROPPED_BITS) - OFFSET) << 4
        word = (word | zero_point.to(torch.int32)).masked_fill(broken, NAN_WORD)
        return torch.where(word > 0x7FFF, word - 0x10000, word).to(torch.int16)


def codec(fmt: KVFormat) -> Codec:
    return ShortInt4Codec()
