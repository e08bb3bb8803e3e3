"""Two 4-bit codes in a byte: byte i holds element 2i in its low nibble, 2i + 1 in its high one."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """Integer codes 0..15 [.., n] to uint8 [.., n / 2]; n is even."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def look_up(packed: Tensor, values: Tensor) -> Tensor:
    """uint8 [.., n / 2] to float32 [.., n], each code c replaced by `values[c]` (float32 [16])."""
    code = torch.arange(16, device=values.device).repeat(16)
    low, high = values[code], values[code.view(16, 16).t().reshape(-1)]
    # One look-up per byte: its two float32 values travel as one int64.
    pairs = torch.stack((low, high), dim=-1).view(torch.int64).view(256)
    flat = packed.reshape(-1).to(torch.int32)
    found = torch.index_select(pairs, 0, flat).view(torch.float32)
    return found.view(*packed.shape[:-1], 2 * packed.shape[-1])
