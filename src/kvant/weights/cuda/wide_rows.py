"""Launches `wide_rows.cu`: products of 2 to 64 rows with narrow weights on Hopper, by `wgmma`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import FLOAT, INT, POINTER, Kernel
from kvant.weights.codecs import NarrowWeight
from kvant.weights.cuda import few_rows
from kvant.weights.cuda.few_rows import BLOCK, Act, Kind, Warps, address, token_tiles
from kvant.weights.format import Code, WeightFormat

_SOURCES = "decode.cuh", "wide_rows.cu"
ARGUMENTS = (*[POINTER] * 13, *[INT] * 5, FLOAT)
_CARRIERS = 4
_FEW = 16
"""Most tokens whose rows are not stored in blocks."""
_SQUARES = 64
"""Sums of squares of a stripe, one for each token."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut. tiles: of 16 weight rows per warp. warps: per program, a multiple of 4.

    With `Around.weighted`, tiles * warps is 4, 8 or 16. stages: groups of code blocks in flight. ahead:
    blocks of x in shared memory. parts: of the columns. deep: blocks of 128 columns per group. resident:
    programs that must fit a multiprocessor's registers.
    """

    tiles: int
    warps: int
    stages: int
    ahead: int
    parts: int
    deep: int = 2
    resident: int = 1

    @property
    def rows(self) -> int:
        """Rows of the weight that a program takes."""
        return 16 * self.tiles * self.warps


@dataclass(frozen=True, slots=True)
class Around:
    """Operations that a launch folds into its product.

    norm: x is normalised after the product. act: activation of gates, whose rows precede those of ups. added:
    the residual is added. weighted: also returns that sum times the next norm's weight; plus: times
    1 + weight. takes_blocks: x is `Blocks`. makes_blocks: gated results, or weighted sums, become `Blocks`.
    """

    norm: bool = False
    act: Act | None = None
    added: bool = False
    weighted: bool = False
    plus: bool = False
    takes_blocks: bool = False
    makes_blocks: bool = False


PLAIN = Around()


@dataclass(frozen=True, slots=True)
class Beside:
    """More tensors of a launch, which reads only what its `Around` needs.

    squares: float32 [stripes, 64] of x. residual: [tokens, width]. norm_weight: [width] of the next norm.
    """

    squares: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    norm_weight: Tensor | None = None


NOTHING = Beside()


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows x [tokens, columns] in bfloat16, stored as `wide_rows.cu` multiplies them by e4m3 codes.

    data: bfloat16 [columns / 128, 1024 * tiles], blocks of 128 columns of 8 * tiles tokens, times 2 ** 64.
    Tokens from `tokens` on are undefined. A product then copies whole blocks, without reordering columns.
    """

    data: Tensor
    tokens: int

    @staticmethod
    def empty(tokens: int, columns: int, device: torch.device) -> Blocks:
        """Returns undefined rows. columns: a multiple of 128."""
        shape = columns // BLOCK, 8 * BLOCK * token_tiles(tokens)
        return Blocks(torch.empty(shape, dtype=torch.bfloat16, device=device), tokens)

    def __len__(self) -> int:
        return self.tokens

    @property
    def columns(self) -> int:
        """Columns of x."""
        return BLOCK * len(self.data)


@dataclass(frozen=True, slots=True)
class Found:
    """out: [tokens, width]. weighted: out times the next norm's weight. squares: float32 [stripes, 64]."""

    out: Tensor | Blocks
    weighted: Tensor | Blocks | None = None
    squares: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """`out` of a launch that was not asked for blocks."""
        assert isinstance(self.out, Tensor)
        return self.out


@dataclass(frozen=True, slots=True)
class Call:
    """A launch: its results, memory for sums, number of programs (stripes, parts), and arguments."""

    found: Found
    partial: Tensor | None
    programs: tuple[int, int]
    values: tuple[int | float, ...]


def reads(fmt: WeightFormat, rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernel reads weights [rows, columns] on any Hopper GPU."""
    reads = few_rows.reads(fmt, rows, columns, dtype) and columns % BLOCK == 0
    return reads and not few_rows.is_grouped(fmt) and fmt.code is not Code.E2M1


def takes_blocks(fmt: WeightFormat, tokens: int) -> bool:
    """Whether products in bfloat16 with weights that `reads` accepts take x as `Blocks`.

    Engines with fp8 on an H200 became faster with 24 and 32 tokens, and slower with 8 and 16. Chains of
    products with int4 became slower.
    """
    return fmt.code is Code.E4M3 and tokens > _FEW


def defines(
    fmt: WeightFormat,
    tiles: int,
    dtype: torch.dtype,
    cut: Cut,
    around: Around = PLAIN,
    *,
    bias: bool = False,
) -> dict[str, int | str]:
    """Returns the macros of `wide_rows.cu`. tiles: of 8 tokens."""
    kind = Kind(gated=around.act is not None, act=around.act or Act.SILU, added=around.added)
    made = few_rows.defines(
        fmt, 0, tiles, dtype, Warps(cut.tiles, cut.warps, cut.stages), kind, bias=bias
    )
    del made["K"]
    neighbours = fmt.code is Code.E4M3 and dtype is torch.float16
    return {
        **made, "XS": cut.ahead, "DEEP": cut.deep,
        "RESIDENT": cut.resident, "SPLIT": int(cut.parts > 1), "APART": int(not neighbours),
        "RAISED": int(fmt.code is Code.E4M3 and not neighbours),
        "NORM": int(around.norm), "WEIGHTED": int(around.weighted) * (2 if around.plus else 1),
        "IN_BLOCKS": int(around.takes_blocks), "STORES_BLOCKS": int(around.makes_blocks),
    }  # fmt: skip


def shared_bytes(macros: Mapping[str, int | str]) -> int:
    """Returns a program's bytes of dynamic shared memory, as `wide_rows.cu` computes them from macros."""
    m = {name: int(value) for name, value in macros.items()}
    rows = 16 * m["RT"]
    codes = rows * (64 if m["CODE"] >= 2 else 128)
    size = few_rows.SCALE_SIZES[m["SCALE_TYPE"]]
    slot = codes + {0: 0, 1: rows * size, 2: 16}[m["SCALES"]] + (rows if m["ZEROS"] else 0)
    ring = m["XS"] * m["NT"] * 2048 + m["WARPS"] * m["STAGES"] * m["DEEP"] * slot
    results = rows * m["WARPS"] // (2 if m["GATED"] else 1)
    assert not m["WEIGHTED"] or results in (16, 32, 64, 128, 256), "a token's threads share a warp"
    return max(ring + 16 * m["XS"], 8 * m["NT"] * (2 * results + 16)) + 1008  # from 1024 on


@functools.cache
def kernel(
    fmt: WeightFormat,
    tiles: int,
    dtype: torch.dtype,
    cut: Cut,
    around: Around = PLAIN,
    *,
    bias: bool = False,
) -> Kernel:
    """Returns the compiled kernel for `tiles` tiles of 8 tokens.

    Raises RuntimeError if it does not compile.
    """
    macros = defines(fmt, tiles, dtype, cut, around, bias=bias)
    return build.build(__package__, _SOURCES, "wide_rows", macros, shared_bytes(macros), ARGUMENTS)


def compiled_as(cut: Cut) -> Cut:
    """Returns the cut that represents all cuts with the same compiled kernel."""
    return replace(cut, parts=min(cut.parts, 2))


def begin(
    fmt: WeightFormat,
    tiles: int,
    dtype: torch.dtype,
    cut: Cut,
    around: Around = PLAIN,
    *,
    bias: bool = False,
) -> None:
    """Starts compiling the kernel that `kernel` returns for these arguments, in another thread."""
    build.begin(__package__, _SOURCES, defines(fmt, tiles, dtype, cut, around, bias=bias))


def multiply(
    x: Tensor | Blocks,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: Cut,
    around: Around = PLAIN,
    beside: Beside = NOTHING,
) -> Found:
    """Multiplies x [T, columns], contiguous or `Blocks`, T up to 64, by a weight [rows, columns].

    Returns [T, rows] in x's dtype, and what `around` adds. The format must be one that `reads` accepts. bias:
    [rows] or None. With `Around.act` the weight's rows are all gates, then all ups, and the result is
    [T, rows / 2], activated.
    """
    from kvant.kernels.triton.device import arrivals

    arrived = arrivals(weight.device, -(-weight.rows // cut.rows))
    call = arranged(x, weight, bias, cut, arrived, around, beside)
    dtype = data_of(x).dtype
    built = kernel(
        weight.format, token_tiles(len(x)), dtype, compiled_as(cut), around, bias=bias is not None
    )
    built.launch(call.programs, threads(cut), call.values, ahead=True)
    return call.found


def arranged(
    x: Tensor | Blocks,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: Cut,
    arrived: Tensor,
    around: Around = PLAIN,
    beside: Beside = NOTHING,
) -> Call:
    """Returns the launch of `multiply` for x [T, columns], without running it.

    arrived: int32 zeros, at least one for each stripe of rows; zeros again afterwards.
    """
    assert around.takes_blocks is isinstance(x, Blocks)
    tokens, (rows, columns), data = len(x), weight.shape, data_of(x)
    width = rows if around.act is None else rows // 2

    def room(*, is_read: bool) -> Tensor | Blocks:
        if around.makes_blocks and is_read:
            return Blocks.empty(tokens, width, data.device)
        return data.new_empty(tokens, width)

    out = room(is_read=around.act is not None)
    stripes = -(-rows // cut.rows)
    weighted = squares = partial = None
    if around.weighted:
        weighted = room(is_read=True)
        squares = data.new_empty(stripes, _SQUARES, dtype=torch.float32)
    if cut.parts > 1:
        sums = stripes * cut.parts * 4 * cut.tiles * token_tiles(tokens) * 32 * cut.warps
        partial = data.new_empty(sums, dtype=torch.float32)
    stride = weight.scales.stride(0) if weight.scales.ndim > 1 else 0
    pointers = (
        weight.codes, weight.scales, weight.zeros, data, bias, beside.squares, beside.residual,
        beside.norm_weight, data_of(out), None if weighted is None else data_of(weighted), squares, partial,
        arrived,
    )  # fmt: skip
    before = 0 if beside.squares is None else beside.squares.shape[0]
    values = (
        *(address(one) for one in pointers), tokens, rows, columns, stride, before, beside.eps,
    )  # fmt: skip
    return Call(Found(out, weighted, squares), partial, (stripes, cut.parts), values)


def data_of(x: Tensor | Blocks) -> Tensor:
    """Returns the tensor that holds x: rows [T, columns], or `Blocks.data`."""
    return x.data if isinstance(x, Blocks) else x


def threads(cut: Cut) -> int:
    """Returns the number of threads of a program."""
    return 32 * (cut.warps + _CARRIERS)
