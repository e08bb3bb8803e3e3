"""Launches `shared_rows.cu`: products of 9 to 64 rows with narrow weights on Hopper.

`few_rows.cu` reads x once for every 16 to 64 rows of a weight, which is slow here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import INT, POINTER, Kernel
from kvant.weights.codecs import NarrowWeight
from kvant.weights.cuda import few_rows
from kvant.weights.cuda.few_rows import BLOCK, Act, Kind, Warps, address, token_tiles
from kvant.weights.format import WeightFormat

_SOURCES = "decode.cuh", "shared_rows.cu"
ARGUMENTS = (*[POINTER] * 8, *[INT] * 4)


@dataclass(frozen=True, slots=True)
class Shares:
    """How a product is cut. tiles: of 16 weight rows per warp. warps: per program. stages: blocks in flight.

    parts: of the columns.
    """

    tiles: int
    warps: int
    stages: int
    parts: int


@dataclass(frozen=True, slots=True)
class Call:
    """A launch: its result, memory for sums, number of programs (stripes, parts), and arguments."""

    out: Tensor
    partial: Tensor | None
    programs: tuple[int, int]
    values: tuple[int, ...]


def reads(fmt: WeightFormat, rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernel reads weights [rows, columns] on any Hopper GPU."""
    reads = few_rows.reads(fmt, rows, columns, dtype) and columns % BLOCK == 0
    return reads and not few_rows.is_grouped(fmt)


def defines(
    fmt: WeightFormat,
    tiles: int,
    dtype: torch.dtype,
    cut: Shares,
    act: Act | None,
    *,
    bias: bool = False,
) -> dict[str, int | str]:
    """Returns the macros of `shared_rows.cu`. tiles: of 8 tokens. act: of gated rows, or None."""
    kind = Kind(gated=act is not None, act=act or Act.SILU)
    made = few_rows.defines(
        fmt, 0, tiles, dtype, Warps(cut.tiles, cut.warps, cut.stages), kind, bias=bias
    )
    del made["K"]
    return {**made, "NEIGHBOURS": 1, "SPLIT": int(cut.parts > 1)}


def shared_bytes(macros: Mapping[str, int | str]) -> int:
    """Returns a program's bytes of dynamic shared memory, as `shared_rows.cu` computes them from macros."""
    m = {name: int(value) for name, value in macros.items()}
    rows = m["WARPS"] * m["RT"] * 16
    codes = rows * (64 if m["CODE"] >= 2 else 128)
    size = few_rows.SCALE_SIZES[m["SCALE_TYPE"]]
    scales = {0: 0, 1: max(1, BLOCK // m["GROUP"]) * rows * size, 2: 16 * m["WARPS"]}[m["SCALES"]]
    slot = codes + scales + (rows if m["ZEROS"] else 0)
    return m["STAGES"] * (slot + 8 * m["NT"] * 272)


@functools.cache
def kernel(
    fmt: WeightFormat,
    tiles: int,
    dtype: torch.dtype,
    cut: Shares,
    act: Act | None = None,
    *,
    bias: bool = False,
) -> Kernel:
    """Returns the compiled kernel for `tiles` tiles of 8 tokens.

    Raises RuntimeError if it does not compile.
    """
    macros = defines(fmt, tiles, dtype, cut, act, bias=bias)
    size = shared_bytes(macros)
    return build.build(__package__, _SOURCES, "shared_rows", macros, size, ARGUMENTS)


def compiled_as(cut: Shares) -> Shares:
    """Returns the cut that represents all cuts with the same compiled kernel."""
    return replace(cut, parts=min(cut.parts, 2))


def begin(
    fmt: WeightFormat,
    tiles: int,
    dtype: torch.dtype,
    cut: Shares,
    act: Act | None = None,
    *,
    bias: bool = False,
) -> None:
    """Starts compiling the kernel that `kernel` returns for these arguments, in another thread."""
    build.begin(__package__, _SOURCES, defines(fmt, tiles, dtype, cut, act, bias=bias))


def multiply(
    x: Tensor, weight: NarrowWeight, bias: Tensor | None, cut: Shares, act: Act | None = None
) -> Tensor:
    """Multiplies x [T, columns], contiguous, T up to 64, by a weight; returns [T, rows] in x's dtype.

    The format must be one that `reads` accepts. bias: [rows] or None. act: the weight's rows are all gates,
    then all ups, and the result is [T, rows / 2], activated.
    """
    from kvant.kernels.triton.device import arrivals

    stripes = -(-weight.rows // (16 * cut.tiles * cut.warps))
    call = arranged(x, weight, bias, cut, act, arrivals(x.device, stripes))
    tiles = token_tiles(x.shape[0])
    built = kernel(weight.format, tiles, x.dtype, compiled_as(cut), act, bias=bias is not None)
    built.launch(call.programs, cut.warps * 32, call.values, ahead=True)
    return call.out


def arranged(
    x: Tensor,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: Shares,
    act: Act | None,
    arrived: Tensor,
) -> Call:
    """Returns the launch of `multiply` for x [T, columns], without running it.

    arrived: int32 zeros, at least one for each stripe of rows; zeros again afterwards.
    """
    tokens, (rows, columns) = x.shape[0], weight.shape
    out = x.new_empty(tokens, rows if act is None else rows // 2)
    stripes = -(-rows // (16 * cut.tiles * cut.warps))
    partial = None
    if cut.parts > 1:
        room = stripes * cut.parts * 4 * cut.tiles * token_tiles(tokens) * 32 * cut.warps
        partial = x.new_empty(room, dtype=torch.float32)
    stride = weight.scales.stride(0) if weight.scales.ndim > 1 else 0
    pointers = (
        weight.codes, weight.scales, weight.zeros, x, bias, out, partial, arrived,
    )  # fmt: skip
    values = (*(address(one) for one in pointers), tokens, rows, columns, stride)
    return Call(out, partial, (stripes, cut.parts), values)
