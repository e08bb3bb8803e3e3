"""What launches share: planes as kernels load them, and facts of the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kvant.attention.triton.codec import Reading
from kvant.attention.triton.rotation import rotate_rows


def rotate(x: Tensor, block: int) -> Tensor:
    """Rows of x [.., n] (contiguous or not) rotated and divided by `block`: float32."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    n = x.shape[-1]
    rows = x.numel() // n
    rotate_rows[(triton.cdiv(rows, 4),)](
        x, out, rows, 1.0 / block,
        HEAD=n, PAD=triton.next_power_of_2(n), SIZE=block, ROWS=4, num_warps=1,
    )  # fmt: skip
    return out


def words(planes: tuple[Tensor, ...], reading: Reading) -> tuple[Tensor, Tensor | None]:
    """A side's planes as kernels load them: words, and scales or None."""
    codes = planes[0].view(reading.word)
    if reading.scale is None:
        return codes, None
    return codes, planes[1].view(reading.scale)


def shifts(device: torch.device, *readings: Reading) -> Tensor | None:
    """Where words of 24 bits begin in units of 32, for `codec.load_words`; None where none are read."""
    return _shifts(device) if any(r.elements == 8 for r in readings) else None


@cache
def _shifts(device: torch.device) -> Tensor:
    return torch.tensor([0, 24, 16, 8], dtype=torch.int32, device=device)


def stores(planes: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """A side's planes as the writer stores them: codes, and scales (floats as bits) or None."""
    if len(planes) == 1:
        return planes[0], None
    bits = {torch.float32: torch.int32, torch.float16: torch.int16}
    scales = planes[1]
    return planes[0], scales.view(bits.get(scales.dtype, scales.dtype))


def outer(scale: Tensor | None) -> int:
    """0 without a scale outside the pages, 1 for one, 2 for one per KV head."""
    if scale is None:
        return 0
    return 1 if scale.numel() == 1 else 2


def pad(head_dim: int, reading: Reading) -> int:
    """Words of a row, padded to a power of two that a matrix product takes."""
    return max(16, int(triton.next_power_of_2(head_dim // reading.elements)))


def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


_arrivals: dict[tuple[torch.device, int], Tensor] = {}


def arrivals(device: torch.device, count: int) -> Tensor:
    """Zeros where programs that share a result count themselves; whoever is last leaves zeros behind.

    Launches that use them run one after the other. Kept for good: recorded steps keep the address.
    """
    size = max(1 << 16, int(triton.next_power_of_2(count)))
    if (device, size) not in _arrivals:
        _arrivals[device, size] = torch.zeros(size, dtype=torch.int32, device=device)
    return _arrivals[device, size]


def shared_memory_of_a_program(device: torch.device) -> int:
    """Bytes that one program can have at most."""
    if device.type == "cpu":
        return 1 << 17  # Triton's interpreter
    facts: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack this field
    return int(facts.shared_memory_per_block_optin)


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def launches_ahead(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it still runs: NVIDIA, sm_90 and later."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= (9, 0)


def has_ptx(device: torch.device) -> bool:
    """Whether inline PTX with e4m3 conversions can be used: NVIDIA, sm_89 and later."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= (8, 9)
