"""Codes of 3 or 4 bits behind each other: code i of a row begins at bit i * bits, least significant first.

For 4 bits these are two codes in a byte, the even one low; for 3 bits eight codes in three bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.kv.codecs import nibbles


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integer codes [.., n] to uint8 [.., n * bits / 8]; n * bits is a multiple of 8."""
    if bits == 4:
        return nibbles.pack(codes)
    codes = codes.to(torch.int32)
    eights = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    shifts = torch.arange(0, 8 * bits, bits, dtype=torch.int32, device=codes.device)
    words = (eights << shifts).sum(-1, dtype=torch.int32).unsqueeze(-1)
    parts = (words >> _bytes(codes.device)) & 0xFF
    return parts.to(torch.uint8).flatten(-2)


def look_up(packed: Tensor, values: Tensor, bits: int) -> Tensor:
    """uint8 [.., n * bits / 8] to float32 [.., n], each code c replaced by `values[c]`."""
    if bits == 4:
        return nibbles.look_up(packed, values)
    threes = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 3, 3).to(torch.int32)
    words = (threes << _bytes(packed.device)).sum(-1, dtype=torch.int32).unsqueeze(-1)
    shifts = torch.arange(0, 8 * bits, bits, dtype=torch.int32, device=packed.device)
    codes = (words >> shifts) & ((1 << bits) - 1)
    found = torch.index_select(values, 0, codes.reshape(-1))
    return found.view(*packed.shape[:-1], packed.shape[-1] * 8 // bits)


def _bytes(device: torch.device) -> Tensor:
    """Where the three bytes of eight codes begin, in bits."""
    return torch.arange(0, 24, 8, dtype=torch.int32, device=device)
