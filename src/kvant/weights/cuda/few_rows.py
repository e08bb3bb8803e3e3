"""Launches `few_rows.cu`: products of up to 64 rows with narrow weights on Hopper.

It reads weights at nearly the speed of their bytes. Triton's kernels take over where it does not build.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import INT, POINTER, Kernel
from kvant.weights.codecs import NarrowWeight
from kvant.weights.format import WHOLE, Code, Scale, WeightFormat

logger = logging.getLogger(__name__)

MOST_ROWS = 64
BLOCK = 128
"""Columns at a time; also the groups and blocks whose scales it reads."""

_CODES = {Code.E4M3: 0, Code.INT8: 1, Code.INT4: 2}
_SCALES = {Scale.FLOAT32: 0, Scale.FLOAT16: 1, Scale.BFLOAT16: 2}
_ARGUMENTS = (
    POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT, INT,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Warps:
    """How a product is cut: tiles of 16 rows of a warp, warps of a program, blocks loaded ahead."""

    tiles: int
    warps: int
    ahead: int


def serves(fmt: WeightFormat, columns: int) -> bool:
    """Whether the kernel reads this format on this device. The answer is the same for all steps."""
    shared = (fmt.rows, fmt.columns)
    shares = {(1, WHOLE), (1, BLOCK), (BLOCK, BLOCK)}
    return (
        fmt.code in _CODES
        and fmt.scale in _SCALES
        and shared in shares
        and not fmt.global_scale
        and columns % BLOCK == 0
        and _available()
    )


@functools.cache
def _available() -> bool:
    reason = build.unavailable()
    if reason is not None:
        level = logging.WARNING if build.is_hopper() else logging.INFO
        logger.log(level, "products with narrow weights run in the general kernels: %s", reason)
    return reason is None


def defines(
    fmt: WeightFormat, tokens: int, dtype: torch.dtype, cut: Warps, *, bias: bool
) -> dict[str, int | str]:
    """Macros of `few_rows.cu`."""
    shares = {(1, WHOLE): 0, (1, BLOCK): 1, (BLOCK, BLOCK): 2}
    return {
        "CODE": _CODES[fmt.code], "SCALES": shares[fmt.rows, fmt.columns],
        "SCALE_TYPE": _SCALES[fmt.scale], "ZEROS": int(fmt.zero_points), "BIAS": int(bias),
        "BFLOAT16": int(dtype is torch.bfloat16), "NT": token_tiles(tokens), "RT": cut.tiles,
        "WARPS": cut.warps, "AHEAD": cut.ahead,
    }  # fmt: skip


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens of a program."""
    return next(count for count in (1, 2, 4, 8) if tokens <= 8 * count or count == 8)


@functools.cache
def kernel(fmt: WeightFormat, tiles: int, dtype: torch.dtype, cut: Warps, *, bias: bool) -> Kernel:
    """The compiled kernel for `tiles` tiles of 8 tokens. RuntimeError if it does not compile."""
    macros = defines(fmt, 8 * tiles, dtype, cut, bias=bias)
    shared = 512 * tiles * cut.tiles * cut.warps
    return build.build(__package__, ("few_rows.cu",), "few_rows", macros, shared, _ARGUMENTS)


def multiply(x: Tensor, weight: NarrowWeight, bias: Tensor | None, cut: Warps) -> Tensor:
    """x [T, columns], bfloat16 or float16, contiguous -> [T, rows], for a format that it `serves`."""
    tokens, (rows, columns) = x.shape[0], weight.shape
    out = x.new_empty(tokens, rows)
    tiles = token_tiles(tokens)
    built = kernel(weight.format, tiles, x.dtype, cut, bias=bias is not None)
    beside = -(-tokens // (8 * tiles))
    programs = beside * -(-rows // (16 * cut.tiles))
    stride = weight.scales.stride(0) if weight.scales.ndim > 1 else 0
    zeros = 0 if weight.zeros is None else weight.zeros.data_ptr()
    built.launch(programs, cut.warps * 32, (
        weight.codes.data_ptr(), weight.scales.data_ptr(), zeros, x.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), tokens, rows, columns, beside, stride,
    ))  # fmt: skip
    return out
