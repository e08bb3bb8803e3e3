"""Copies of small tensors to a device and back, beside running work."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor [n, ..] of any dtype to the device without waiting for running work."""
    if device.type == "cpu" or not numbers.numel():
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def to_host(numbers: Tensor) -> Callable[[], Tensor]:
    """Begins to copy a tensor [n, ..] of any dtype, as it is after all work that was launched so far.

    The result waits for the copy and returns it. Any thread may call it.
    """
    if numbers.device.type == "cpu":
        copied = numbers.clone()
        return lambda: copied
    target = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    target.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(numbers.device))

    def read() -> Tensor:
        event.synchronize()
        return target

    return read
