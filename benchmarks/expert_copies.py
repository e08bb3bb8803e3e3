"""A candidate for products of experts with many pairs: the tensor memory accelerator copies their operands.

Not part of the package until it was timed beside `kvant.models.fused.experts_kernels.many`, which it would
replace: `python -m benchmarks.moe --sweep`. It multiplies unquantised weights without biases or clamps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.expert_copies_kernels import copied, list_blocks
from kvant.kernels.triton.device import launches_ahead, multiprocessors
from kvant.models.fused.experts import Experts
from kvant.models.fused.triton_experts import Choice, ManyTile, TritonExperts

_EVERY = 4  # numbers of a block in the table


@dataclass(frozen=True, slots=True)
class Copied:
    """Tiles of gate and up, and of down. lasting: programs per multiprocessor that take tile after tile.

    With 0, each tile has a program.
    """

    up: ManyTile
    down: ManyTile
    lasting: int = 0

    def __str__(self) -> str:
        sides = (
            f"{t.pairs}x{t.rows}x{t.depth} s{t.stages} w{t.warps}" for t in (self.up, self.down)
        )
        return f"copied {', '.join(sides)}, lasting {self.lasting}"


def multiply(
    kernels: TritonExperts, x: Tensor, choice: Choice, experts: Experts, how: Copied
) -> Tensor:
    """Returns the weighted results [pairs, H] of x [T, H] in 16 bits, as `TritonExperts.many` does."""
    device, routing, top_k = x.device, experts.routing, experts.routing.top_k
    assert experts.clamp is None
    ahead = launches_ahead(device)
    options: dict[str, Any] = {"AHEAD": ahead, **({"launch_pdl": True} if ahead else {})}
    order, ends = kernels.sort(choice, routing)
    h = x.new_empty(choice.pairs, experts.width)
    parts = x.new_empty(choice.pairs, x.shape[1])
    tables: dict[int, tuple[Tensor, Tensor, int]] = {}
    sides = (True, experts.gate_up, h, how.up), (False, experts.down, parts, how.down)
    for is_gated, (weight, bias), out, tile in sides:
        assert isinstance(weight, Tensor)
        assert bias is None
        if tile.pairs not in tables:
            most = choice.pairs // tile.pairs + min(routing.num_experts, choice.pairs)
            table, count = ends.new_empty(most, _EVERY), ends.new_empty(1)
            list_blocks[(routing.num_experts,)](
                ends, table, count, E=routing.num_experts,
                E_PAD=triton.next_power_of_2(routing.num_experts), PAIRS=tile.pairs, **options,
                num_warps=1,
            )  # fmt: skip
            tables[tile.pairs] = table, count, most
        table, count, most = tables[tile.pairs]
        n, columns = weight.shape[1:]
        programs = most * triton.cdiv(out.shape[1], tile.rows)
        if how.lasting:
            programs = min(programs, how.lasting * multiprocessors(device))
        copied[(programs,)](
            x, TensorDescriptor.from_tensor(h, [tile.pairs, min(tile.depth, h.shape[1])]),
            TensorDescriptor.from_tensor(weight.view(-1, columns), [tile.rows, tile.depth]),
            order, table, count, choice.weights, out, TOP_K=top_k, N=n, COLUMNS=columns,
            PAIRS=tile.pairs, ROWS=tile.rows, DEPTH=tile.depth, STAGES=tile.stages, GATED=is_gated,
            **options, num_warps=tile.warps,
        )  # fmt: skip
    return parts


def ways(tokens: int) -> list[Copied]:
    """Returns what a sweep times for a step of some tokens; all compile for an H200 without spills."""
    if tokens >= 2048:
        small, large = ManyTile(128, 128, 64, 3), ManyTile(128, 256, 64, 4)
        return [
            Copied(ManyTile(128, 128, 64, 4), large),
            Copied(ManyTile(128, 128, 64, 4), small),
            Copied(ManyTile(128, 64, 64, 3), small),
            Copied(ManyTile(128, 128, 64, 4), large, lasting=1),
            Copied(ManyTile(128, 64, 64, 3), small, lasting=2),
        ]
    return [
        Copied(ManyTile(64, 128, 64, 4), ManyTile(64, 256, 64, 3)),
        Copied(ManyTile(64, 64, 64, 4, 4), ManyTile(64, 128, 64, 4, 4)),
        Copied(ManyTile(64, 64, 128, 3, 4), ManyTile(64, 128, 128, 2, 4)),
        Copied(ManyTile(64, 128, 64, 4), ManyTile(64, 256, 64, 5), lasting=1),
        Copied(ManyTile(64, 64, 64, 4, 4), ManyTile(64, 128, 64, 4, 4), lasting=2),
    ]
