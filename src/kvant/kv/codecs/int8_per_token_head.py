"""int8_per_token_head: two's complement codes -127..127 and a float32 scale per token and KV head.

scale = max(absmax(row) / 127, 2^-126); code = nearest integer to x / scale, ties to even; value =
code * scale. A row that contains NaN has scale NaN and codes 0, and decodes to NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec
from kvant.kv.codecs.conversion import narrow, row_scale, widen
from kvant.kv.format import Encoding, KVFormat

LARGEST = Encoding.INT8.largest


@dataclass(frozen=True, slots=True)
class RowScaledInt8Codec:
    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        assert scale is None
        x = widen(x)
        scales = row_scale(x.abs().amax(-1, keepdim=True), LARGEST)
        steps = (x / scales).round_().clamp_(-LARGEST, LARGEST)
        # What an integer cast makes of NaN differs between devices.
        steps = steps.masked_fill_(scales.isnan(), 0.0)
        return steps.to(torch.int8).view(torch.uint8), scales

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        assert scale is None
        codes, scales = planes
        return narrow(codes.view(torch.int8).to(torch.float32).mul_(scales), dtype)


def codec(fmt: KVFormat) -> Codec:
    return RowScaledInt8Codec()
