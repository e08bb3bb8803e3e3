"""Products of experts on Hopper GPUs with weights and activations in e4m3: weights in blocks of 128 x 128.

Each token is rounded once, with a scale for 128 columns. Gates and ups write their results rounded, in the
order of the experts. The tensor memory accelerator copies weights, and the rows of down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvant.models.fused import rounded_experts_kernels as kernels
from kvant.models.fused.experts import Experts, GateOrder
from kvant.models.fused.resident_experts import Blocks
from kvant.weights.codecs import NarrowStack
from kvant.weights.format import FP8_BLOCK
from kvant.weights.rounding import RoundedRows
from kvant.weights.triton.product import boxes, stages

BLOCK = 128

PAIRS = 128
"""Pairs of one expert in a tile."""


def serves(experts: Experts, dtype: torch.dtype) -> bool:
    """Whether products here serve a layer: blocks of 128 x 128 within experts, no biases, no clamp."""
    sides = experts.gate_up, experts.down
    return (
        dtype is torch.bfloat16
        and experts.clamp is None
        and experts.order is GateOrder.HALVES
        and experts.width % BLOCK == 0
        and all(
            isinstance(weight, NarrowStack)
            and bias is None
            and weight.whole.format == FP8_BLOCK
            and weight.shape[1] % BLOCK == 0
            and weight.shape[2] % BLOCK == 0
            for weight, bias in sides
        )
    )


def gate_up(x: RoundedRows, experts: Experts, blocks: Blocks) -> RoundedRows:
    """Computes activated gates and ups of x [T, H]: [pairs, I], rounded, in the order of the blocks.

    x: rounded with a scale for 128 columns, as the result is. blocks: of `PAIRS` pairs.
    """
    weight, _ = experts.gate_up
    assert isinstance(weight, NarrowStack)
    count, columns, width = len(blocks.order), weight.shape[2], experts.width
    codes = x.codes.new_empty(count, width)
    scales = x.scales.new_empty(count, width // BLOCK)
    kernels.gate_rounded[_programs(blocks, width // BLOCK)](
        x.codes, x.scales, boxes(weight.whole.codes, BLOCK), weight.whole.scales, *blocks.lists,
        codes, scales, TOP_K=blocks.top_k, N=2 * width, COLUMNS=columns, STAGES=stages(2),
        num_warps=4, **blocks.options,
    )  # fmt: skip
    return RoundedRows(codes, scales, x.dtype)


def down(h: RoundedRows, experts: Experts, blocks: Blocks, shares: Tensor) -> Tensor:
    """Computes the weighted results [pairs, H] of h [pairs, I] from `gate_up`. shares: float32 [T, top_k]."""
    weight, _ = experts.down
    assert isinstance(weight, NarrowStack)
    rows, columns = weight.shape[1:]
    halves = 2 if rows % (2 * BLOCK) == 0 else 1
    out = torch.empty(len(h), rows, dtype=h.dtype, device=h.codes.device)
    kernels.down_rounded[_programs(blocks, rows // (halves * BLOCK))](
        boxes(h.codes, BLOCK // 2), h.scales, boxes(weight.whole.codes, BLOCK), weight.whole.scales,
        shares, *blocks.lists, out, N=rows, COLUMNS=columns, HALVES=halves, STAGES=stages(halves),
        num_warps=4, **blocks.options,
    )  # fmt: skip
    return out


def _programs(blocks: Blocks, tiles: int) -> tuple[int]:
    """Returns the grid for blocks that are cut into `tiles` tiles: a program for each multiprocessor."""
    assert blocks.pairs == PAIRS
    return (min(len(blocks.table) * tiles, blocks.processors),)
