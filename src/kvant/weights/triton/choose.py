"""Which kernel multiplies how many rows with a narrow weight on a GPU, and how it is cut."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from kvant.kernels.triton.device import multiprocessors
from kvant.weights.codecs import NarrowWeight
from kvant.weights.format import WHOLE, WeightFormat
from kvant.weights.triton.product import Stripe, Tiles, decoded, one, tiled

MOST_TILED = 256
"""Rows up to which tiles are decoded as they are multiplied; for more the whole weight is decoded first."""

_INVARIANT_TOKENS = 64


def multiply(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """x [T, columns] -> [T, rows] in x's dtype, by the fastest kernel for this number of rows."""
    tokens = x.shape[0]
    if tokens == 0:
        return x.new_empty(0, weight.rows)
    x = x.contiguous()
    processors = multiprocessors(x.device)
    if tokens == 1:
        return one(x, weight, bias, stripe(weight.format, *weight.shape))
    if tokens <= MOST_TILED:
        return tiled(x, weight, bias, tiles(weight.format, tokens, *weight.shape, processors))
    scratch = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
    return F.linear(x, decoded(weight, scratch), bias)


def multiply_alike(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """`multiply` in one way for any T: no row's result [rows] depends on the rows beside it."""
    if x.shape[0] == 0:
        return x.new_empty(0, weight.rows)
    x = x.contiguous()
    processors = multiprocessors(x.device)
    cut = tiles(weight.format, _INVARIANT_TOKENS, *weight.shape, processors)
    return tiled(x, weight, bias, cut)


@cache
def stripe(fmt: WeightFormat, rows: int, columns: int) -> Stripe:
    """The cut of `one`: a program takes two rows, or one of a long weight."""
    block = min(2048, triton.next_power_of_2(columns))
    if fmt.columns != WHOLE:
        block = max(block, fmt.columns)
    return Stripe(2, block, 4)


@cache
def tiles(fmt: WeightFormat, tokens: int, rows: int, columns: int, processors: int) -> Tiles:
    """The cut of `tiled`: enough programs for the device, by parts of the columns where rows are few."""
    wide = max(16, min(128, triton.next_power_of_2(tokens)))
    height, warps, stages = (64, 4, 5) if wide <= 64 else (128, 8, 3)
    depth = 128
    programs = triton.cdiv(rows, height) * triton.cdiv(tokens, wide)
    split = 1
    while (
        programs * split * 2 <= 4 * processors and columns // (depth * split * 2) >= 4 and split < 8
    ):
        split *= 2
    return Tiles(wide, height, depth, split, stages, warps)
