"""How the codec tests look at planes and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.kv.dtype import KVDtype


def plane_bytes(plane: Tensor) -> bytes:
    """The bytes of a plane as they lie in memory, row after row."""
    return bytes(plane.contiguous().reshape(-1).view(torch.uint8).tolist())


def same_bytes(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether planes agree byte for byte (NaN equals itself, -0 differs from 0)."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and plane_bytes(x) == plane_bytes(y)
        for x, y in zip(a, b, strict=True)
    )


def same_values(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal numbers, the sign of zero included; NaNs are equal with any payload."""
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def usual_scale(dtype: KVDtype, value: float = 1.0) -> Tensor | None:
    """A scale from outside, [1], if the format takes one."""
    return torch.tensor([value]) if dtype.format.takes_outside_scale else None
