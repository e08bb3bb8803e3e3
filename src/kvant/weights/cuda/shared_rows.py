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
ARGUMENTS = (*[POINTER] * 9, *[INT] * 4)
_LAY_ARGUMENTS = (*[POINTER] * 3, INT)
_LAY_THREADS = 512


@dataclass(frozen=True, slots=True)
class Shares:
    """How a product is cut. tiles: of 16 weight rows per warp. warps: per program. stages: blocks in flight.

    parts: of the columns. laid: four warps multiply together, with x as `lay_rows` writes it.
    """

    tiles: int
    warps: int
    stages: int
    parts: int
    laid: bool = False


@dataclass(frozen=True, slots=True)
class Laid:
    """The result of `lay_rows` for x [T, columns]: bytes in shared memory's order; factors of sums [T]."""

    numbers: Tensor
    unscale: Tensor


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
    return {
        **made, "NEIGHBOURS": int(not cut.laid), "SPLIT": int(cut.parts > 1), "LAID": int(cut.laid),
    }  # fmt: skip


def shared_bytes(macros: Mapping[str, int | str]) -> int:
    """Returns a program's bytes of dynamic shared memory, as `shared_rows.cu` computes them from macros."""
    m = {name: int(value) for name, value in macros.items()}
    rows = m["WARPS"] * m["RT"] * 16
    codes = rows * (64 if m["CODE"] >= 2 else 128)
    size = few_rows.SCALE_SIZES[m["SCALE_TYPE"]]
    scales = {0: 0, 1: max(1, BLOCK // m["GROUP"]) * rows * size, 2: 16 * m["WARPS"]}[m["SCALES"]]
    slot = codes + scales + (rows if m["ZEROS"] else 0)
    if not m["LAID"]:
        return m["STAGES"] * (slot + 8 * m["NT"] * 272)
    slot += m["NT"] * 2048
    return m["STAGES"] * -(-slot // 1024) * 1024 + 1008  # from a multiple of 1024 on


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
    laid = lay(x, weight.format, cut, act, bias=bias is not None) if cut.laid else None
    call = arranged(x, weight, bias, cut, act, arrivals(x.device, stripes), laid)
    tiles = token_tiles(x.shape[0])
    built = kernel(weight.format, tiles, x.dtype, compiled_as(cut), act, bias=bias is not None)
    built.launch(call.programs, cut.warps * 32, call.values, ahead=True)
    return call.out


def lay(x: Tensor, fmt: WeightFormat, cut: Shares, act: Act | None, *, bias: bool) -> Laid:
    """Arranges x [T, columns] for products with weights of this format, in a separate launch."""
    room = 8 * token_tiles(len(x)) * x.shape[1] * 2
    found = Laid(x.new_empty(room, dtype=torch.uint8), x.new_empty(len(x), dtype=torch.float32))
    macros = defines(fmt, token_tiles(len(x)), x.dtype, compiled_as(cut), act, bias=bias)
    built = _layer(tuple(macros.items()))
    values = address(x), address(found.numbers), address(found.unscale), x.shape[1]
    built.launch(len(x), _LAY_THREADS, values, ahead=True)
    return found


@functools.cache
def _layer(macros: tuple[tuple[str, int | str], ...]) -> Kernel:
    return build.build(__package__, _SOURCES, "lay_rows", dict(macros), 0, _LAY_ARGUMENTS)


def arranged(
    x: Tensor,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: Shares,
    act: Act | None,
    arrived: Tensor,
    laid: Laid | None = None,
) -> Call:
    """Returns the launch of `multiply` for x [T, columns], without running it.

    arrived: int32 zeros, at least one for each stripe of rows; zeros again afterwards. laid: the result of
    `lay`, for a cut with `laid`.
    """
    assert cut.laid == (laid is not None)
    tokens, (rows, columns) = x.shape[0], weight.shape
    out = x.new_empty(tokens, rows if act is None else rows // 2)
    stripes = -(-rows // (16 * cut.tiles * cut.warps))
    partial = None
    if cut.parts > 1:
        room = stripes * cut.parts * 4 * cut.tiles * token_tiles(tokens) * 32 * cut.warps
        partial = x.new_empty(room, dtype=torch.float32)
    stride = weight.scales.stride(0) if weight.scales.ndim > 1 else 0
    numbers, unscale = (x, None) if laid is None else (laid.numbers, laid.unscale)
    pointers = (
        weight.codes, weight.scales, weight.zeros, numbers, bias, out, unscale, partial, arrived,
    )  # fmt: skip
    values = (*(address(one) for one in pointers), tokens, rows, columns, stride)
    return Call(out, partial, (stripes, cut.parts), values)
