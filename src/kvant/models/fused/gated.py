"""The product of gate and up for long prompts, with the activation where it ends.

cuBLAS takes as long for the sums alone as this takes for everything, and what it stores must be read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kvant.attention.triton.launch import is_nvidia, multiprocessors

FEWEST = 2048
"""Rows of x: with fewer the ways do not differ, and steps that are recorded have fewer."""
ROWS, COLUMNS, DEPTH = 128, 128, 64
"""A tile of the result, and how much of both operands is multiplied at a time."""
_GROUP = 16
"""Tiles that read the same weights run one after the other."""


def fits(weight: Tensor) -> bool:
    """Whether the kernel multiplies with gates and ups [2 * width, in]: measured on Hopper alone."""
    both, into = weight.shape
    return (
        weight.dtype in (torch.float16, torch.bfloat16)
        and weight.is_contiguous()
        and both % (2 * COLUMNS) == 0
        and into % DEPTH == 0
        and is_nvidia(weight.device)
        and torch.cuda.get_device_capability(weight.device) == (9, 0)
    )


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) for x [T, in], weight [gates and ups, in]; [T, width].

    Rounds as the product and the activation in two launches do.
    """
    rows, into = x.shape
    width = len(weight) // 2
    out = x.new_empty(rows, width)
    tiles = triton.cdiv(rows, ROWS) * (width // COLUMNS)
    programs = min(tiles, multiprocessors(x.device))
    gated_product[(programs,)](
        _blocks(x, ROWS, DEPTH), _blocks(weight, COLUMNS, DEPTH), _blocks(out, ROWS, COLUMNS),
        rows, programs, WIDTH=width, INTO=into, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
        GROUP=_GROUP, num_warps=8, num_stages=4,
    )  # fmt: skip
    return out


def _blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


@triton.jit(do_not_specialize=("rows", "programs"))
def gated_product(
    x, weight, out, rows, programs,
    WIDTH: tl.constexpr, INTO: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program: every so manieth tile. x, weight, out: descriptors; rows outside read as 0."""
    down = tl.cdiv(rows, ROWS)
    across: tl.constexpr = WIDTH // COLUMNS
    for tile in range(tl.program_id(0), down * across, programs):
        first = tile // (GROUP * across) * GROUP
        height = min(down - first, GROUP)
        within = tile % (GROUP * across)
        row = (first + within % height) * ROWS
        column = within // height * COLUMNS
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, INTO, DEPTH):
            a = x.load([row, k])
            gate = tl.dot(a, weight.load([column, k]).T, gate)
            up = tl.dot(a, weight.load([WIDTH + column, k]).T, up)
        wide = gate.to(out.dtype).to(tl.float32)
        silu = (wide / (1.0 + tl.exp(-wide))).to(out.dtype).to(tl.float32)
        y = silu * up.to(out.dtype).to(tl.float32)
        out.store([row, column], y.to(out.dtype))
