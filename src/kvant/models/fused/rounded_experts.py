"""Products of experts on Hopper GPUs with weights and activations in e4m3: weights in blocks of 128 x 128.

Each token is rounded once, with a scale for 128 columns. Gates and ups write their results rounded, in the
order of the experts. The tensor memory accelerator copies weights, and the rows of down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvant.models.fused import rounded_experts_kernels as kernels
from kvant.models.fused.experts import Experts, GateOrder
from kvant.models.fused.resident_experts import Blocks
from kvant.weights.codecs import NarrowStack
from kvant.weights.format import FP8_BLOCK
from kvant.weights.rounding import RoundedRows

BLOCK = 128


@dataclass(frozen=True, slots=True)
class RoundedTile:
    """A tile of `gate_rounded` or `down_rounded`.

    stages: tiles in flight. programs: per multiprocessor, which take tile after tile; 0: one for each tile.
    """

    stages: int = 4
    warps: int = 8
    programs: int = 0


@dataclass(frozen=True, slots=True)
class RoundedTiles:
    """Tiles of both products. pairs: of one expert, in a tile. halves: of 128 rows, in a tile of down."""

    pairs: int
    up: RoundedTile
    down: RoundedTile
    halves: int = 2


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


def gate_up(x: RoundedRows, experts: Experts, blocks: Blocks, tile: RoundedTile) -> RoundedRows:
    """Computes activated gates and ups of x [T, H]: [pairs, I], rounded, in the order of the blocks.

    x: rounded with a scale for 128 columns, as the result is.
    """
    weight, _ = experts.gate_up
    assert isinstance(weight, NarrowStack)
    count, columns, width = len(blocks.order), weight.shape[2], experts.width
    codes = x.codes.new_empty(count, width)
    scales = x.scales.new_empty(count, width // BLOCK)
    blocks.launch(
        kernels.gate_rounded, width // BLOCK, tile.programs,
        x.codes, x.scales, _copied(weight), weight.whole.scales,
        *blocks.lists, codes, scales, TOP_K=blocks.top_k, N=2 * width, COLUMNS=columns,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return RoundedRows(codes, scales, x.dtype)


def down(
    h: RoundedRows, experts: Experts, blocks: Blocks, shares: Tensor, tile: RoundedTile, halves: int
) -> Tensor:
    """Computes the weighted results [pairs, H] of h [pairs, I] from `gate_up`. shares: float32 [T, top_k].

    halves: of 128 rows of the weight, in a tile.
    """
    weight, _ = experts.down
    assert isinstance(weight, NarrowStack)
    rows, columns = weight.shape[1:]
    halves = halves if rows % (halves * BLOCK) == 0 else 1
    out = torch.empty(len(h), rows, dtype=h.dtype, device=h.codes.device)
    blocks.launch(
        kernels.down_rounded, rows // (halves * BLOCK), tile.programs,
        TensorDescriptor.from_tensor(h.codes, [blocks.pairs, BLOCK]), h.scales,
        _copied(weight), weight.whole.scales, shares, *blocks.lists, out,
        N=rows, COLUMNS=columns, HALVES=halves, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out


def _copied(weight: NarrowStack) -> TensorDescriptor:
    """Describes a weight's codes, of which boxes of 128 x 128 are copied."""
    codes = weight.whole.codes.view(torch.float8_e4m3fn)
    return TensorDescriptor.from_tensor(codes, [BLOCK, BLOCK])
