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

    @property
    def options(self) -> dict[str, int]:
        """Arguments of a launch."""
        return {
            "ROWS": self.rows, "DEPTH": self.depth, "STAGES": self.stages, "num_warps": self.warps,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class CopiedTiles:
    """Tiles of both products. pairs: of one expert, in a tile."""

    pairs: int
    up: CopiedTile
    down: CopiedTile


def serves(experts: Experts, dtype: torch.dtype) -> bool:
    """Whether products here serve a layer: unquantised, no biases, no clamp, long and aligned rows."""
    weights = experts.gate_up[0], experts.down[0]
    whole = all(isinstance(one, Tensor) and one.is_contiguous() for one in weights)
    return whole and serves_decoded(experts, dtype)


def serves_decoded(experts: Experts, dtype: torch.dtype) -> bool:
    """Whether products here serve a layer, if its weights are decoded first."""
    return (
        dtype in (torch.float16, torch.bfloat16)
        and experts.clamp is None
        and experts.order is GateOrder.HALVES
        and all(
            bias is None
            and weight.shape[2] % 8 == 0  # descriptors want strides of 16 bytes
            and weight.shape[2] >= _SHORTEST
            for weight, bias in (experts.gate_up, experts.down)
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

    @property
    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """Order, table and count, as kernels take them."""
        return self.order, self.table, self.count

    def launch(self, kernel: Any, tiles: int, programs: int, *given: Any, **constants: Any) -> None:
        """Launches a product that cuts each block into `tiles` tiles.

        programs: per multiprocessor, which take tile after tile; 0: one for each tile.
        """
        count = len(self.table) * tiles
        if programs:
            count = min(count, programs * self.processors)
        kernel[(count,)](*given, PAIRS=self.pairs, STAYS=programs > 0, **constants, **self.options)


def list_blocks(
    order: Tensor,
    ends: Tensor,
    routing: Routing,
    pairs: int,
    processors: int,
    options: dict[str, Any],
    first: int = 0,
) -> Blocks:
    """Cuts pairs into blocks. order, ends: from `TritonExperts.sort`, int32 [pairs] and [E].

    first: of the experts of `ends`, if that is a view of some of all experts' ends.
    """
    count = len(ends)
    most = len(order) // pairs + min(count, len(order))
    table, blocks = ends.new_empty(most, _EVERY), ends.new_empty(1)
    kernels.list_blocks[(count,)](
        ends, table, blocks, E=count, E_PAD=max(2, triton.next_power_of_2(count)), PAIRS=pairs,
        FOLLOWS=first > 0, **options, num_warps=1,
    )  # fmt: skip
    return Blocks(order, table, blocks, pairs, routing.top_k, processors, options)


def gate_up(
    x: Tensor, experts: Experts, blocks: Blocks, tile: CopiedTile, out: Tensor | None = None
) -> Tensor:
    """Computes activated gates and ups of x [T, H]: [pairs, I], in the order of blocks; in out if given."""
    weight, _ = experts.gate_up
    assert isinstance(weight, Tensor)
    both, width = weight.view(-1, experts.width, x.shape[1]), experts.width
    out = x.new_empty(len(blocks.order), width) if out is None else out
    blocks.launch(
        kernels.gate_blocks, triton.cdiv(width, tile.rows), tile.programs,
        x, TensorDescriptor.from_tensor(both, [2, tile.rows, tile.depth]), *blocks.lists, out,
        TOP_K=blocks.top_k, N=2 * width, COLUMNS=x.shape[1], **tile.options,
    )  # fmt: skip
    return out


def down(
    h: Tensor,
    experts: Experts,
    blocks: Blocks,
    shares: Tensor,
    tile: CopiedTile,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the weighted results [pairs, H] of h [pairs, I] from `gate_up`; in out if given.

    shares: float32 [T, top_k].
    """
    weight, _ = experts.down
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape[1:]
    out = h.new_empty(len(h), rows) if out is None else out
    blocks.launch(
        kernels.down_blocks, triton.cdiv(rows, tile.rows), tile.programs,
        TensorDescriptor.from_tensor(h, [blocks.pairs, tile.depth]),
        TensorDescriptor.from_tensor(weight.view(-1, columns), [tile.rows, tile.depth]), shares,
        *blocks.lists, out, N=rows, COLUMNS=columns, **tile.options,
    )  # fmt: skip
    return out
