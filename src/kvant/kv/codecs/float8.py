"""The 8-bit float encodings: numbers to codes and back, without any scale.

    e4m3fn    s eeee mmm   bias 7   max 448     NaN 0x7f 0xff   OCP 8-bit floating point v1.0
    e4m3fnuz  s eeee mmm   bias 8   max 240     NaN 0x80        no negative zero; AMD gfx942
    e5m2      s eeeee mm   bias 15  max 57344   NaN 0x7d..0x7f, inf 0x7c   OCP; Kvant writes no inf

Torch's casts round correctly but treat what lies beyond the largest value differently (torch 2.13
saturates e4m3fn, sends e5m2 to infinity and e4m3fnuz to NaN), so numbers are clamped here first;
and they keep the sign of NaN, which a GPU's conversion does not, so NaN gets one code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvant.kv.format import Encoding


@dataclass(frozen=True, slots=True)
class Float8:
    """One encoding: torch's dtype of it, its largest value, and the code that NaN gets."""

    dtype: torch.dtype
    max: float
    nan_code: int

    @property
    def mantissa_bits(self) -> int:
        return -round(math.log2(torch.finfo(self.dtype).eps))

    @property
    def bias(self) -> int:
        """The exponent's bias: the smallest normal number is 2^(1 - bias)."""
        return 1 - round(math.log2(torch.finfo(self.dtype).smallest_normal))

    def encode(self, x: Tensor) -> Tensor:
        """float32 [..] to uint8 codes [..]: nearest, ties to even, saturating."""
        codes = x.clamp(-self.max, self.max).to(self.dtype).view(torch.uint8)
        return codes.masked_fill_(x.isnan(), self.nan_code)

    def decode(self, codes: Tensor) -> Tensor:
        """uint8 codes [..] to their float32 numbers [..].

        By table: several times faster than torch's cast on a CPU.
        """
        table = _values(self.dtype, codes.device)
        flat = codes.reshape(-1).to(torch.int32)
        return torch.index_select(table, 0, flat).view(codes.shape)


FLOAT8 = {
    encoding: Float8(dtype, encoding.largest, nan_code)
    for encoding, dtype, nan_code in (
        (Encoding.E4M3FN, torch.float8_e4m3fn, 0x7F),
        (Encoding.E4M3FNUZ, torch.float8_e4m3fnuz, 0x80),
        (Encoding.E5M2, torch.float8_e5m2, 0x7F),
    )
}


@cache
def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """float32 [256]: the number that each code means."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).to(device)
