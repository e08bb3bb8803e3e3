"""Steps that codecs share: conversion to float32 and back, and IEEE division on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.kv.codecs import CLAMP

# Smallest scale a row makes for itself: the smallest normal float32. Dividing by it loses nothing
# and no subnormal scale exists for a device that flushes those to zero.
MIN_ROW_SCALE = 2.0**-126


def widen(x: Tensor) -> Tensor:
    """x [..] of any floating dtype as float32 in [-CLAMP, CLAMP]. Infinities become the bound, NaN stays."""
    return x.to(torch.float32).clamp(-CLAMP, CLAMP)


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts values [..] to `dtype`: rounded to nearest even, saturating (infinities too), NaN stays.

    Between float32 and float64 in the widening direction, and within one dtype, nothing changes.
    """
    if torch.promote_types(values.dtype, dtype) is dtype:
        return values.to(dtype)
    if values.dtype is not torch.float64:
        values = values.to(torch.float32)  # float16 and bfloat16: neither holds the other
    bound = torch.finfo(dtype).max
    return values.clamp(-bound, bound).to(torch.float32).to(dtype)


def divide(x: Tensor, by: float) -> Tensor:
    """Returns x [..] / by in the dtype of x, correctly rounded.

    Torch on CUDA turns `x / 127.0` into a product with a rounded 1/127.
    """
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def row_scale(span: Tensor, steps: float) -> Tensor:
    """span / steps, at least MIN_ROW_SCALE; NaN becomes the one canonical NaN 0x7fc00000.

    span: [.., 1] float32, not negative.
    """
    scale = divide(span, steps).clamp_(min=MIN_ROW_SCALE)
    return torch.where(scale.isnan(), float("nan"), scale)


def per_head(scale: Tensor | None) -> Tensor:
    """Returns an outside scale, [1] or [heads], as float32 [.., 1], for rows [.., heads, head_dim]."""
    assert scale is not None, "this format needs the scale that its layer's storage keeps"
    return scale.to(torch.float32).reshape(-1, 1)
