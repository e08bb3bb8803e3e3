"""Measures how fast a GPU reads its memory, which limits attention over a long context."""

from __future__ import annotations

import math
import statistics

import torch
import triton
import triton.language as tl

from kvant.measure.gpu_time import time_us


@triton.jit  # type: ignore[untyped-decorator]
def _read(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(p * BLOCK, n, tl.num_programs(0) * BLOCK):
        total += tl.load(x + i + tl.arange(0, BLOCK))
    tl.store(out + p, tl.sum(total, 0))


def read_bandwidth(device: torch.device) -> float:
    """Returns the TB/s of the fastest of a few read-and-add kernels over 2 GiB."""
    x = torch.randint(0, 100, (2**29,), device=device, dtype=torch.int32)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs * 8, device=device, dtype=torch.int32)
    best = math.inf
    for block in (2048, 4096):
        for per in (2, 4, 8):
            times = time_us(
                lambda block=block, per=per: _read[(programs * per,)](  # type: ignore[misc]
                    x, out, x.numel(), BLOCK=block, num_warps=8
                ),
                repeats=7,
            )
            best = min(best, statistics.median(times))
    return x.numel() * 4 / best / 1e6
