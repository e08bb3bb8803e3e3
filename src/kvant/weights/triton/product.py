"""Launches products with narrow weights: passes a weight's layout, and a cut, to the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Boxes
from triton.tools.tensor_descriptor import TensorDescriptor

from kvant.kernels.triton.device import arrivals, has_ptx, has_tile_copies, multiprocessors
from kvant.weights.codecs import NarrowStack, NarrowWeight, decode, pick_rows, rows_of
from kvant.weights.format import Q4_1, Q4_K, Q6_K, WHOLE, Code, Scale
from kvant.weights.triton import block_kernels, blocks, kernels
from kvant.weights.triton.decode import E2M1, E4M3, INT4, INT8

_CODES = {
    Code.E4M3: E4M3.value,
    Code.INT8: INT8.value,
    Code.INT4: INT4.value,
    Code.E2M1: E2M1.value,
}
_SCALES = {Scale.E8M0: 1, Scale.E4M3: 2}
_BLOCKS = {
    Q4_1: block_kernels.Q4_1.value,
    Q4_K: block_kernels.Q4_K.value,
    Q6_K: block_kernels.Q6_K.value,
}
"""Formats that `block_kernels` multiplies by."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How `kernels.product` cuts a product: tokens and rows of a program, columns of a step, parts of the
    columns, steps in flight, warps.
    """

    tokens: int
    rows: int
    depth: int
    split: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """How `kernels.vector` cuts a product: rows of a program, columns at a time, warps."""

    rows: int
    block: int
    warps: int


def layout(weight: NarrowWeight, depth: int) -> dict[str, Any]:
    """Returns kernel arguments that describe a weight's scales. depth: columns of a step of the kernel."""
    fmt = weight.format
    group = weight.columns if fmt.columns == WHOLE else fmt.columns
    if fmt.columns == WHOLE:
        share, scale_n, scale_k = kernels.PER_OUTPUT, int(fmt.rows != WHOLE), 0
        block_rows, group = 1, 32
    else:
        share = kernels.PER_STEP if depth == group else kernels.FINE
        block_rows = fmt.rows
        if fmt.rows == 1:
            scale_n, scale_k = 1, weight.scales.stride(0)
        else:
            scale_n, scale_k = weight.scales.stride(0), 1
    return {
        "SCALE_N": scale_n, "SCALE_K": scale_k, "CODE": _CODES[fmt.code], "SHARE": share.value,
        "SCALE": _SCALES.get(fmt.scale, 0), "GROUP": group, "BLOCK_ROWS": block_rows,
        "ZEROS": weight.zeros is not None, "FACTOR": weight.global_scale is not None,
    }  # fmt: skip


def tiled(x: Tensor, weight: NarrowWeight, bias: Tensor | None, cut: Tiles) -> Tensor:
    """Multiplies x [T, columns] by `kernels.product` or `block_product`; returns [T, rows] in x's dtype."""
    tokens, (n, columns) = x.shape[0], weight.shape
    out = x.new_empty(tokens, n)
    tiles, stripes = triton.cdiv(tokens, cut.tokens), triton.cdiv(n, cut.rows)
    partial = None
    if cut.split > 1:
        room = tiles * stripes * cut.split * cut.rows * cut.tokens
        partial = x.new_empty(room, dtype=torch.float32)
    if weight.format in _BLOCKS:
        block_kernels.block_product[(tiles, stripes, cut.split)](
            x, *_block_tensors(weight), bias, out, partial, arrivals(x.device, tiles * stripes), tokens,
            cut.split, n, columns, **_block_layout(weight), TOKENS=cut.tokens, ROWS=cut.rows,
            DEPTH=cut.depth, PARTS=cut.split > 1, STAGES=cut.stages, BIAS=bias is not None,
            num_warps=cut.warps,
        )  # fmt: skip
        return out
    even = n % cut.rows == 0 and columns % (cut.depth * cut.split) == 0
    kernels.product[(tiles, stripes, cut.split)](
        x, weight.codes, weight.scales, weight.zeros, weight.global_scale, bias, out, partial,
        arrivals(x.device, tiles * stripes), tokens, cut.split, n, columns, **layout(weight, cut.depth),
        TOKENS=cut.tokens, ROWS=cut.rows, DEPTH=cut.depth, PARTS=cut.split > 1, STAGES=cut.stages,
        BIAS=bias is not None, EVEN=even, PTX=_ptx(x), num_warps=cut.warps,
    )  # fmt: skip
    return out


def one(x: Tensor, weight: NarrowWeight, bias: Tensor | None, cut: Stripe) -> Tensor:
    """Multiplies one row x [1, columns] by `kernels.vector` or `block_vector`.

    Returns [1, rows] in x's dtype.
    """
    n, columns = weight.shape
    out = x.new_empty(1, n)
    if weight.format in _BLOCKS:
        block_kernels.block_vector[(triton.cdiv(n, cut.rows),)](
            x, *_block_tensors(weight), bias, out, n, columns, **_block_layout(weight), ROWS=cut.rows,
            BLOCK=cut.block, BIAS=bias is not None, num_warps=cut.warps,
        )  # fmt: skip
        return out
    kernels.vector[(triton.cdiv(n, cut.rows),)](
        x, weight.codes, weight.scales, weight.zeros, weight.global_scale, bias, out, n, columns,
        **layout(weight, 0), ROWS=cut.rows, BLOCK=cut.block, BIAS=bias is not None,
        EVEN=columns % cut.block == 0 and n % cut.rows == 0, PTX=_ptx(x), num_warps=cut.warps,
    )  # fmt: skip
    return out


def decoded(weight: NarrowWeight, out: Tensor) -> Tensor:
    """Decodes a weight into out [rows, columns], and returns it."""
    if weight.format in _BLOCKS:
        return _decode_blocks(weight, None, out)
    n, columns = weight.shape
    rows, block = 8, 256
    kernels.decode_tile[(triton.cdiv(n, rows), triton.cdiv(columns, block))](
        weight.codes, weight.scales, weight.zeros, weight.global_scale, out, n, columns,
        **layout(weight, 0), ROWS=rows, BLOCK=block, PTX=_ptx(out), num_warps=4,
    )  # fmt: skip
    return out


def decoded_stack(stack: NarrowStack, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Decodes `count` weights of a stack, from `first` on: [count, rows, columns] in this dtype."""
    rows, columns = stack.shape[1:]
    some = rows_of(stack.whole, first * rows, count * rows)
    out = torch.empty(count, rows, columns, dtype=dtype, device=some.device)
    decoded(some, out.view(-1, columns))
    return out


def rows_decoded(weight: NarrowWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Decodes rows [n] of a weight in groups of inputs; returns [n, columns] in this dtype."""
    if weight.format in _BLOCKS:
        out = torch.empty(len(rows), weight.columns, dtype=dtype, device=rows.device)
        return _decode_blocks(weight, rows, out) if len(rows) else out
    return decode(pick_rows(weight, rows), dtype)


def _decode_blocks(weight: NarrowWeight, rows: Tensor | None, out: Tensor) -> Tensor:
    count, columns = out.shape
    tall, block = (8 if rows is None else 1), 256
    # Products and sums are rounded one after the other, as the codec does.
    block_kernels.decode_blocks[(triton.cdiv(count, tall), triton.cdiv(columns, block))](
        rows, *_block_tensors(weight), out, count, columns, **_block_layout(weight),
        PICKED=rows is not None, ROWS=tall, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _block_tensors(weight: NarrowWeight) -> tuple[Tensor | None, ...]:
    return weight.codes, weight.scales, weight.offsets, weight.factors


def _block_layout(weight: NarrowWeight) -> dict[str, int]:
    factors = weight.factors
    return {
        "SCALE_K": weight.scales.stride(0),
        "FACTOR_K": 0 if factors is None else factors.stride(1),
        "FACTOR_O": 0 if factors is None else factors.stride(0),
        "KIND": _BLOCKS[weight.format],
    }


def round_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Rounds x [T, columns], contiguous, by a scale per row. codes: float8_e4m3fn like x. scales: [T, 1]."""
    tokens, columns = x.shape
    block = triton.next_power_of_2(columns)
    kernels.round_row[(tokens,)](
        x, codes, scales, columns, BLOCK=block, num_warps=16 if block > 8192 else 8
    )


def round_by(x: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Rounds x [T, columns], contiguous, by one scale, float32 [1]. Writes codes: float8_e4m3fn like x."""
    block = 4096
    kernels.round_by[(triton.cdiv(x.numel(), block),)](
        x, codes, scale, x.numel(), BLOCK=block, num_warps=8
    )


def round_groups(x: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    """Rounds x [T, columns], contiguous, by a scale for each `group` numbers.

    codes: like x, float8_e4m3fn. scales: [T, columns / group] float32. Both are written.
    """
    tokens, columns = x.shape
    kernels.round_groups[(tokens, triton.cdiv(columns // group, 16))](
        x, codes, scales, columns, GROUP=group, GROUPS=16, num_warps=4
    )


def of_blocks(x: Tensor, scales: Tensor, weight: NarrowWeight, out: Tensor) -> Tensor:
    """Multiplies codes x [T, columns] by a weight in blocks, into out [T, rows].

    scales: [T, columns / 128] float32, of `round_groups`.
    """
    if has_tile_copies(x.device):
        return of_copied_blocks(x, scales, weight, out)
    tokens, (n, columns) = x.shape[0], weight.shape
    wide = 128 if tokens > 64 else 64
    kernels.product_of_blocks[(triton.cdiv(n, 128), triton.cdiv(tokens, wide))](
        x, scales, weight.codes.view(torch.float8_e4m3fn), weight.scales, None, out, tokens, n, columns,
        weight.scales.stride(0), TOKENS=wide, STAGES=4, BIAS=False, num_warps=8 if wide == 128 else 4,
    )  # fmt: skip
    return out


def of_copied_blocks(x: Tensor, scales: Tensor, weight: NarrowWeight, out: Tensor) -> Tensor:
    """Implements `of_blocks`, [T, rows] of x [T, columns], with tiles of the tensor memory accelerator.

    Tiles of 128 x 256 need half as many programs as there are multiprocessors. Measured on an H200: 8,488 x
    2,048 x 5,120 took 157 us (1,135 TFLOP/s), 209 with tiles of 64 x 128; 512 x 4,096 x 2,048 took 27 and 14.
    """
    tokens, (n, columns) = x.shape[0], weight.shape
    tiles, most = triton.cdiv(tokens, 128) * triton.cdiv(n, 256), multiprocessors(x.device)
    if 2 * tiles >= most:
        blocks.product_of_blocks[(min(tiles, most),)](
            boxes(x, 64), scales, boxes(weight.codes, 128), weight.scales, out, tokens, n,
            COLUMNS=columns, HALVES=2, STAGES=stages(2), num_warps=4,
        )  # fmt: skip
        return out
    kernels.copied_product_of_blocks[(triton.cdiv(n, 128), triton.cdiv(tokens, 64))](
        TensorDescriptor.from_tensor(x, [64, 128]), scales,
        TensorDescriptor.from_tensor(weight.codes.view(torch.float8_e4m3fn), [128, 128]), weight.scales,
        out, tokens, n, columns, TOKENS=64, STAGES=4, num_warps=4,
    )  # fmt: skip
    return out


def boxes(codes: Tensor, rows: int) -> Boxes:
    """Describes codes of e4m3 [n, columns], of which boxes [rows, 128] are copied."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return Boxes.from_tensor(codes.view(torch.float8_e4m3fn), [rows, 128], layout)


def stages(halves: int) -> int:
    """Returns the places of a ring for tiles of 128 rows of x and 128 * halves rows of a weight: 192 KiB."""
    return 4 if halves == 2 else 6


def _ptx(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and has_ptx(x.device)


def processors(x: Tensor) -> int:
    """Returns the number of multiprocessors of the device of x [..]."""
    return multiprocessors(x.device)
