"""e2m1, the 4-bit float: a sign and 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP microscaling formats v1.0)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(x: Tensor) -> Tensor:
    """float32 [..] without NaN to int32 codes 0..15 [..]: nearest, ties to even, saturating; -0 is 8.

    The magnitudes stand 0.5 apart up to 2, then 1 up to 4, then 2 up to 6; rounding within each
    stretch and adding up gives the code, and ties to even integers are ties to even codes.
    """
    size = x.abs()
    halves = (size * 2.0).clamp_(max=4.0).round_()
    ones = (size - 2.0).clamp_(0.0, 2.0).round_()
    twos = ((size - 4.0) * 0.5).clamp_(0.0, 1.0).round_()
    sign = (x.view(torch.int32) >> 28) & 8
    return halves.add_(ones).add_(twos).to(torch.int32) | sign


@cache
def values(device: torch.device) -> Tensor:
    """float32 [16]: the number that each code means."""
    positive = torch.tensor(MAGNITUDES, dtype=torch.float32)
    return torch.cat((positive, -positive)).to(device)
