"""Device facts that launches depend on, and counters that programs of one launch share."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor


def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_arrivals: dict[tuple[torch.device, int], Tensor] = {}


def arrivals(device: torch.device, count: int) -> Tensor:
    """Returns zeroed int32 counters [>= count] for programs that share a result; the last one resets them.

    Launches that use them must not overlap. Never freed, because CUDA graphs keep the address.
    """
    size = max(1 << 16, int(triton.next_power_of_2(count)))
    if (device, size) not in _arrivals:
        _arrivals[device, size] = torch.zeros(size, dtype=torch.int32, device=device)
    return _arrivals[device, size]


def shared_memory_of_a_program(device: torch.device) -> int:
    """Returns the maximum bytes of shared memory per program."""
    if device.type == "cpu":
        return 1 << 17  # Triton's interpreter
    facts: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack this field
    return int(facts.shared_memory_per_block_optin)


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


@cache
def launches_ahead(device: torch.device) -> bool:
    """Whether a kernel can be launched while the previous one still runs: NVIDIA, sm_90 and later."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def has_tile_copies(device: torch.device) -> bool:
    """Whether kernels are measured that copy tiles with the tensor memory accelerator: Hopper."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device)[0] == 9


def has_ptx(device: torch.device) -> bool:
    """Whether inline PTX can convert e4m3: NVIDIA, sm_89 and later."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= (8, 9)
