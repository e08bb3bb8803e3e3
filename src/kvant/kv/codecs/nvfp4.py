"""nvfp4: e2m1 codes, an e4m3 scale per 16 neighbouring elements, and a global scale g from outside.

    amax  = absmax(block)
    s     = e4m3((amax / 6) / g), saturating at 448; where amax > 0, at least 2^-9
    code  = e2m1(x / (s * g)), saturating at 6
    value = e2m1(code) * (s * g)

A block of zeros has s = 0 and codes 0; no other block does. A block that contains NaN has scale
code 0x7f and codes 0, and decodes to NaN. Scales lie in the order of their blocks.

g is the checkpoint's (ModelOpt stores amax / 448), or a fixed one: `kvant.kv.nvfp4_scales`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kv.codecs import Codec, e2m1, packed
from kvant.kv.codecs.conversion import divide, narrow, per_head, widen
from kvant.kv.codecs.float8 import FLOAT8, Float8
from kvant.kv.format import Encoding, KVFormat

_SMALLEST_SCALE = 0x01  # e4m3 code of 2^-9


@dataclass(frozen=True, slots=True)
class BlockScaledE2M1Codec:
    scale_float8: Float8
    block: int

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, ...]:
        """Implements `Codec.encode`: x [..., num_kv_heads, head_dim]; scale as there."""
        blocks = self._in_blocks(widen(x))
        outer = per_head(scale)
        amax = blocks.abs().amax(-1)
        scale_codes = self.scale_float8.encode(divide(amax, Encoding.E2M1.largest) / outer)
        scale_codes.masked_fill_((scale_codes == 0) & (amax > 0), _SMALLEST_SCALE)
        step = (self.scale_float8.decode(scale_codes) * outer).unsqueeze(-1)
        # Not positive: a block of zeros, where 0 / 0 is NaN, or a block with NaN.
        steps = (blocks / step).masked_fill_(~(step > 0), 0.0)
        return packed.pack(e2m1.encode(steps).flatten(-2), 4), scale_codes

    def decode(self, planes: Sequence[Tensor], scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Implements `Codec.decode`: planes -> [..., num_kv_heads, head_dim] in dtype."""
        codes, scale_codes = planes
        numbers = packed.look_up(codes, e2m1.values(codes.device), 4)
        step = self.scale_float8.decode(scale_codes) * per_head(scale)
        values = self._in_blocks(numbers) * step.unsqueeze(-1)
        return narrow(values.flatten(-2), dtype)

    def _in_blocks(self, x: Tensor) -> Tensor:
        """[.., head_dim] to [.., head_dim / block, block]."""
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.block, self.block)


def codec(fmt: KVFormat) -> Codec:
    assert fmt.scale_encoding is not None
    return BlockScaledE2M1Codec(FLOAT8[fmt.scale_encoding], fmt.block)
