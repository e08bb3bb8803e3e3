"""Memory layout of a weight matrix: the torch definition that kernels must match.

Weight-only formats: numbers are decoded to float32 where they are multiplied, activations stay as
they are. Rows are outputs, columns inputs.

    float32   as it is
    int8      one scale a row: w = s q, q in -127 .. 127
    int4      a scale and an offset for 32 numbers of a row, both float16: w = s q + m, q in 0 .. 15
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from kvant.models.cpu.info import GROUP


class Code(IntEnum):
    """The number is part of the compiled code."""

    FLOAT32 = 0
    INT8 = 1
    INT4 = 2


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """codes: float32 [rows, columns], int8 [rows, columns], or uint8 [rows, columns / 2].

    In int4 byte i of a group's 16 has number i in its low half, number i + 16 in its high half.
    scales: None, float32 [rows], or float16 [rows, columns / 32, 2] of s and m.
    """

    code: Code
    codes: Tensor
    scales: Tensor | None
    columns: int

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def num_bytes(self) -> int:
        parts = [self.codes] if self.scales is None else [self.codes, self.scales]
        return sum(part.numel() * part.element_size() for part in parts)


def pack(weight: Tensor, code: Code) -> PackedWeight:
    """weight: float32 [rows, columns], columns a multiple of 32; rounds to nearest, ties to even.

    float32 is not copied if its rows are contiguous.
    """
    rows, columns = weight.shape
    assert weight.dtype is torch.float32
    assert columns % GROUP == 0
    if code is Code.FLOAT32:
        return PackedWeight(code, weight.contiguous(), None, columns)
    if code is Code.INT8:
        scales = weight.abs().amax(1) / 127
        codes = torch.round(weight / _not_zero(scales)[:, None]).to(torch.int8)
        return PackedWeight(code, codes, scales, columns)
    groups = weight.view(rows, -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    offset = low.to(torch.float16)
    scale = ((high - low) / 15).to(torch.float16)
    shifted = (groups - offset.float()[..., None]) / _not_zero(scale.float())[..., None]
    codes = torch.round(shifted).clamp_(0, 15).to(torch.uint8)
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    scales = torch.stack((scale, offset), -1)
    return PackedWeight(code, packed.reshape(rows, -1).contiguous(), scales.contiguous(), columns)


def unpack(weight: PackedWeight) -> Tensor:
    """float32 [rows, columns]: what products multiply with."""
    codes, scales = weight.codes, weight.scales
    if weight.code is Code.FLOAT32:
        return codes
    assert scales is not None
    if weight.code is Code.INT8:
        return codes.float() * scales[:, None]
    groups = codes.view(weight.rows, -1, GROUP // 2)
    numbers = torch.cat((groups & 15, groups >> 4), -1).float()
    scale, offset = scales[..., 0].float(), scales[..., 1].float()
    return (numbers * scale[..., None] + offset[..., None]).view(weight.rows, -1)


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.ones_like(scales), scales)
