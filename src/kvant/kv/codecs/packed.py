"""Codes of 2, 3 or 4 bits behind each other: code i of a row begins at bit i * bits, least significant first.

For 4 bits these are two codes in a byte, the even one low; for 2 bits four codes in a byte; for 3 bits eight
codes in three bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integer codes [.., n] to uint8 [.., n * bits / 8]; n * bits is a multiple of 8."""
    if bits == 4:
        codes = codes.to(torch.uint8)
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    if bits == 2:
        codes = codes.to(torch.uint8)
        pairs = codes[..., 0::2] | (codes[..., 1::2] << 2)
        return pairs[..., 0::2] | (pairs[..., 1::2] << 4)
    codes = codes.to(torch.int32)
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    shifts = torch.arange(0, 8 * bits, bits, dtype=torch.int32, device=codes.device)
    words = (eights << shifts).sum(-1, dtype=torch.int32).unsqueeze(-1)
    parts = (words >> _bytes(codes.device)) & 0xFF
    return parts.to(torch.uint8).flatten(-2)


def look_up(packed: Tensor, values: Tensor, bits: int) -> Tensor:
    """uint8 [.., n * bits / 8] to float32 [.., n], each code c replaced by `values[c]`."""
    if bits == 4:
        return _look_up_pairs(packed, values)
    if bits == 2:
        fours = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
        found = torch.index_select(
            values, 0, ((packed.unsqueeze(-1) >> fours) & 3).reshape(-1).to(torch.int32)
        )
        return found.view(*packed.shape[:-1], 4 * packed.shape[-1])
    threes = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 3, 3).to(torch.int32)
    words = (threes << _bytes(packed.device)).sum(-1, dtype=torch.int32).unsqueeze(-1)
    shifts = torch.arange(0, 8 * bits, bits, dtype=torch.int32, device=packed.device)
    codes = (words >> shifts) & ((1 << bits) - 1)
    found = torch.index_select(values, 0, codes.reshape(-1))
    return found.view(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _bytes(device: torch.device) -> Tensor:
    """Returns where the three bytes of eight codes begin, in bits."""
    return torch.arange(0, 24, 8, dtype=torch.int32, device=device)


def _look_up_pairs(packed: Tensor, values: Tensor) -> Tensor:
    """uint8 [.., n / 2] to float32 [.., n], each code c replaced by `values[c]` (float32 [16])."""
    code = torch.arange(16, device=values.device).repeat(16)
    low, high = values[code], values[code.view(16, 16).t().reshape(-1)]
    # One look-up per byte: its two float32 values travel as one int64.
    pairs = torch.stack((low, high), dim=-1).view(torch.int64).view(256)
    flat = packed.reshape(-1).to(torch.int32)
    found = torch.index_select(pairs, 0, flat).view(torch.float32)
    return found.view(*packed.shape[:-1], 2 * packed.shape[-1])
