"""Copies of small host tensors to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor [n, ..] of any dtype to the device without waiting for running work."""
    if device.type == "cpu" or not len(numbers):
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
