"""Products of experts with many pairs on Hopper GPUs, whose weights the tensor memory accelerator copies.

Results of gates and ups lie in the order of the experts, so that it copies the rows of down too. A program
may stay and take tile after tile: while it writes one tile's results, the next tile's operands come in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvant.models.fused import resident_experts_kernels as kernels
from kvant.models.fused.experts import Experts, GateOrder
from kvant.models.fused.routing import Routing

_EVERY = 4  # numbers of a block in the table
_SHORTEST = 64  # numbers of a row, as many as a tile is deep


@dataclass(frozen=True, slots=True)
class CopiedTile:
    """A tile of `gate_blocks` or `down_blocks`.

    rows: of the weight; of gates, and as many of ups. depth: columns at a time. stages: tiles in flight.
    programs: per multiprocessor, which take tile after tile; 0: one for each tile.
    """

    rows: int
    depth: int = 64
    stages: int = 3
    warps: int = 8
    programs: int = 1


@dataclass(frozen=True, slots=True)
class CopiedTiles:
    """Tiles of both products. pairs: of one expert, in a tile."""

    pairs: int
    up: CopiedTile
    down: CopiedTile


def serves(experts: Experts, dtype: torch.dtype) -> bool:
    """Whether products here serve a layer: unquantised, no biases, no clamp, long and aligned rows."""
    sides = experts.gate_up, experts.down
    return (
        dtype in (torch.float16, torch.bfloat16)
        and experts.clamp is None
        and experts.order is GateOrder.HALVES
        and all(
            isinstance(weight, Tensor)
            and bias is None
            and weight.is_contiguous()
            and weight.shape[2] % 8 == 0  # descriptors want strides of 16 bytes
            and weight.shape[2] >= _SHORTEST
            for weight, bias in sides
        )
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs in the order of their experts, cut into blocks of `pairs` pairs of one expert.

    order: int32 [pairs]. table: int32 [most, 4], the expert of a block, its first pair, and the end of the
    expert's pairs. count: int32 [1], the number of blocks. top_k: pairs of a token. processors:
    multiprocessors of the device. options: of launches.
    """

    order: Tensor
    table: Tensor
    count: Tensor
    pairs: int
    top_k: int
    processors: int
    options: dict[str, Any]

    def launch(
        self, kernel: Any, tile: CopiedTile, out: Tensor, *given: Any, **constants: Any
    ) -> Tensor:
        """Launches a product for all blocks; returns out [pairs, columns], which the kernel writes."""
        programs = len(self.table) * triton.cdiv(out.shape[1], tile.rows)
        if tile.programs:
            programs = min(programs, tile.programs * self.processors)
        kernel[(programs,)](
            *given, self.order, self.table, self.count, out, PAIRS=self.pairs, ROWS=tile.rows,
            DEPTH=tile.depth, STAGES=tile.stages, STAYS=tile.programs > 0,
            **constants, **self.options, num_warps=tile.warps,
        )  # fmt: skip
        return out


def list_blocks(
    order: Tensor,
    ends: Tensor,
    routing: Routing,
    pairs: int,
    processors: int,
    options: dict[str, Any],
) -> Blocks:
    """Cuts pairs into blocks. order, ends: from `TritonExperts.sort`, int32 [pairs] and [E]."""
    count = routing.num_experts
    most = len(order) // pairs + min(count, len(order))
    table, blocks = ends.new_empty(most, _EVERY), ends.new_empty(1)
    kernels.list_blocks[(count,)](
        ends, table, blocks, E=count, E_PAD=max(2, triton.next_power_of_2(count)), PAIRS=pairs,
        **options, num_warps=1,
    )  # fmt: skip
    return Blocks(order, table, blocks, pairs, routing.top_k, processors, options)


def gate_up(x: Tensor, experts: Experts, blocks: Blocks, tile: CopiedTile) -> Tensor:
    """Computes activated gates and ups of x [T, H]: [pairs, I], in the order of the blocks."""
    weight, _ = experts.gate_up
    assert isinstance(weight, Tensor)
    both = weight.view(-1, experts.width, x.shape[1])
    return blocks.launch(
        kernels.gate_blocks, tile, x.new_empty(len(blocks.order), experts.width),
        x, TensorDescriptor.from_tensor(both, [2, tile.rows, tile.depth]),
        TOP_K=blocks.top_k, N=2 * experts.width, COLUMNS=x.shape[1],
    )  # fmt: skip


def down(h: Tensor, experts: Experts, blocks: Blocks, shares: Tensor, tile: CopiedTile) -> Tensor:
    """Computes the weighted results [pairs, H] of h [pairs, I] from `gate_up`. shares: float32 [T, top_k]."""
    weight, _ = experts.down
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape[1:]
    return blocks.launch(
        kernels.down_blocks, tile, h.new_empty(len(h), rows),
        TensorDescriptor.from_tensor(h, [blocks.pairs, tile.depth]),
        TensorDescriptor.from_tensor(weight.view(-1, columns), [tile.rows, tile.depth]), shares,
        N=rows, COLUMNS=columns,
    )  # fmt: skip
