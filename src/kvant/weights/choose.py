"""Chooses the GPU kernel for a product with a narrow weight, by its number of rows, and its tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from functools import cache

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from kvant.kernels.triton.device import has_ptx, multiprocessors
from kvant.weights.codecs import NarrowWeight, decode, encode, rows_of
from kvant.weights.cuda import few_rows, shared_rows, wide_rows
from kvant.weights.cuda.few_rows import Act, Warps
from kvant.weights.cuda.shared_rows import Shares
from kvant.weights.format import MOST_DECODED, WHOLE, Code, Scale, WeightFormat
from kvant.weights.rounding import RoundedRows, Rounding
from kvant.weights.triton.product import (
    Stripe,
    Tiles,
    decoded,
    of_blocks,
    one,
    round_by,
    round_groups,
    round_rows,
    tiled,
)

MOST_TILED = 256
"""Maximum number of rows for kernels that decode tiles; for more rows the whole weight is decoded first."""

_MOST_APART = 8
"""Maximum number of rows for which each warp reads its own columns of x."""

_MANY = 16384
"""Rows of a weight that give every multiprocessor work without splitting its columns."""

MOST_FOLDED = 32
"""Maximum rows of x whose norms and residuals are folded into products: more were not measured on a GPU."""

_FEW_OUTPUTS = 4096
"""Most rows of a weight that few programs take; its columns are split among more of them."""

LISTED = Warps(2, 2, 2)
"""The cut of `few_rows` for experts with lists of pairs.

It took the least time of 24 cuts, for gpt-oss and Qwen3-30B-A3B with 32 and 64 tokens on an H200.
"""

_INVARIANT_TOKENS = 64

_MOST_ERROR = 0.01
"""Maximum relative error of a correct product whose result is rounded to 16 bits."""

logger = logging.getLogger(__name__)


class Kernel(Enum):
    """What multiplies unrounded rows by a narrow weight."""

    FEW_ROWS = "few_rows.cu"
    WIDE_ROWS = "wide_rows.cu"
    SHARED_ROWS = "shared_rows.cu"
    ONE = "one row in Triton"
    TILES = "tiles in Triton"
    DECODED = "decoded, then torch"


def kernel_for(
    fmt: WeightFormat, tokens: int, rows: int, columns: int, dtype: torch.dtype
) -> Kernel:
    """Returns what `multiply` uses for x [tokens, columns] and a weight [rows, columns]; tokens from 1."""
    if tokens <= few_rows.MOST_ROWS and few_serves(fmt, rows, columns, dtype):
        return _cuda_kernel(fmt, tokens, rows, columns, dtype)
    if tokens == 1:
        return Kernel.ONE
    return Kernel.TILES if tokens <= MOST_TILED else Kernel.DECODED


def _cuda_kernel(
    fmt: WeightFormat, tokens: int, rows: int, columns: int, dtype: torch.dtype
) -> Kernel:
    """Returns the CUDA kernel for up to 64 tokens."""
    if takes_wide(fmt, tokens, rows, columns, dtype):
        return Kernel.WIDE_ROWS
    if shares_rows(fmt, tokens, rows, columns, dtype):
        return Kernel.SHARED_ROWS
    return Kernel.FEW_ROWS


def multiply(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """Returns x [T, columns] times a weight, plus bias [rows] or None, by the fastest kernel.

    The result is [T, rows] in x's dtype.
    """
    tokens = x.shape[0]
    if tokens == 0:
        return x.new_empty(0, weight.rows)
    x = _in_order(x, weight)
    processors = multiprocessors(x.device)
    kernel = kernel_for(weight.format, tokens, *weight.shape, x.dtype)
    if kernel is Kernel.ONE:
        return one(x, weight, bias, stripe(weight.format, *weight.shape))
    if kernel is Kernel.TILES:
        return tiled(x, weight, bias, tiles(weight.format, tokens, *weight.shape, processors))
    if kernel is not Kernel.DECODED:
        return _few(x, weight, bias, None, processors)
    return _by_decoding(x, weight, bias)


def _in_order(x: Tensor, weight: NarrowWeight) -> Tensor:
    """Returns x [T, columns], contiguous, with its columns as the weight's codes have them."""
    return x.contiguous() if weight.order is None else x.index_select(1, weight.order)


def _by_decoding(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """Multiplies many rows, in the weight's order of inputs, by a decoded weight.

    A large weight is decoded in parts of its outputs.
    """
    count = weight.rows
    if (weight.format.rows, weight.format.columns) == (1, WHOLE):
        count = min(count, max(1, MOST_DECODED // weight.columns))
    scratch = torch.empty(count, weight.columns, dtype=x.dtype, device=x.device)
    if count == weight.rows:
        return F.linear(x, decoded(weight, scratch), bias)
    out = x.new_empty(len(x), weight.rows)
    for start in range(0, weight.rows, count):
        part = rows_of(weight, start, min(count, weight.rows - start))
        numbers = decoded(part, scratch[: part.rows])
        torch.mm(x, numbers.t(), out=out[:, start : start + part.rows])
    return out if bias is None else out + bias


def takes_rounded(weight: NarrowWeight) -> bool:
    """Whether `multiply_rounded` can multiply by this weight on its device."""
    fmt = weight.format
    shared = (fmt.rows, fmt.columns)
    if fmt.code is not Code.E4M3 or fmt.scale is not Scale.FLOAT32 or not has_ptx(weight.device):
        return False
    if shared == (few_rows.BLOCK, few_rows.BLOCK):
        return weight.columns % few_rows.BLOCK == 0
    return shared in ((1, WHOLE), (WHOLE, WHOLE)) and not (weight.rows % 16 or weight.columns % 16)


def round_activations(x: Tensor, rounding: Rounding) -> RoundedRows:
    """Rounds x [T, columns] to e4m3 in a separate launch."""
    x, made = x.contiguous(), rounding.empty(x)
    if rounding.scale is not None:
        round_by(x, rounding.scale, made.codes)
    elif rounding.group:
        round_groups(x, rounding.group, made.codes, made.scales)
    else:
        round_rows(x, made.codes, made.scales)
    return made


def multiply_rounded(x: RoundedRows, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """Multiplies rounded x [T, columns] by an e4m3 weight; returns [T, rows] in the dtype before rounding.

    x: rounded as `linear.rounding_of` says. bias: [rows] or None.
    """
    fmt, codes = weight.format, weight.codes.view(torch.float8_e4m3fn)
    if x.scales.shape == (1,) and fmt.rows == WHOLE:
        made = torch._scaled_mm(
            x.codes,
            codes.t(),
            x.scales,
            weight.scales,
            out_dtype=x.dtype,
            use_fast_accum=x.fast_sums,
        )
    elif fmt.rows == few_rows.BLOCK:
        out = torch.empty(len(x), weight.rows, dtype=x.dtype, device=x.codes.device)
        made = of_blocks(x.codes, x.scales, weight, out)
    else:
        of_rows = x.scales.expand(len(x), 1).contiguous()
        of_outputs = weight.scales.expand(weight.rows).contiguous()[None]
        made = torch._scaled_mm(
            x.codes, codes.t(), of_rows, of_outputs, out_dtype=x.dtype, use_fast_accum=x.fast_sums
        )
    return made if bias is None else made + bias


def multiply_alike(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """Implements `multiply` with one tile for any T, so that no row's result [rows] depends on other rows."""
    if x.shape[0] == 0:
        return x.new_empty(0, weight.rows)
    x = _in_order(x, weight)
    processors = multiprocessors(x.device)
    cut = tiles(weight.format, _INVARIANT_TOKENS, *weight.shape, processors)
    return tiled(x, weight, bias, cut)


def multiply_gated(x: Tensor, weight: NarrowWeight, bias: Tensor | None, act: Act) -> Tensor | None:
    """Returns act(gates) * ups of x [T, columns] times a weight, [T, rows / 2], in one launch.

    Rows of the weight are all gates, then all ups. bias: [rows] or None. Returns None if no kernel can do
    this.
    """
    serves = few_serves(weight.format, *weight.shape, x.dtype)
    if not 0 < x.shape[0] <= few_rows.MOST_ROWS or weight.rows % 32 or not serves:
        return None
    return _few(_in_order(x, weight), weight, bias, act, multiprocessors(x.device))


def _few(
    x: Tensor, weight: NarrowWeight, bias: Tensor | None, act: Act | None, processors: int
) -> Tensor:
    """Multiplies up to 64 rows, in the weight's order of inputs, by the CUDA kernels.

    act: activation of gated rows, None for plain ones.
    """
    tokens, fmt = x.shape[0], weight.format
    kernel = _cuda_kernel(fmt, tokens, *weight.shape, x.dtype)
    if kernel is Kernel.WIDE_ROWS:
        around = wide_rows.Around(act=act)
        return multiply_wide(x, weight, bias, around, wide_rows.NOTHING).rows
    if kernel is Kernel.SHARED_ROWS:
        shared = shares(fmt, *weight.shape, processors)
        return shared_rows.multiply(x, weight, bias, shared, act)
    kind = few_rows.Kind(one=tokens == 1, gated=act is not None, act=act or Act.SILU)
    one = warps_of_one(fmt, weight.columns, weight.rows)
    cut = one if tokens == 1 else warps(fmt, tokens, *weight.shape)
    return few_rows.multiply(x, weight, bias, cut, kind)


def multiply_wide(
    x: Tensor | wide_rows.Blocks,
    weight: NarrowWeight,
    bias: Tensor | None,
    around: wide_rows.Around,
    beside: wide_rows.Beside,
) -> wide_rows.Found:
    """Multiplies x [T, columns], contiguous or in blocks, for a T that `takes_wide`; folds in `around`."""
    tiles, processors = few_rows.token_tiles(len(x)), multiprocessors(weight.device)
    cut = wide_cut(weight.format, tiles, *weight.shape, processors, around)
    return wide_rows.multiply(x, weight, bias, cut, around, beside)


def takes_wide(fmt: WeightFormat, tokens: int, rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether `wide_rows` is the kernel for this number of rows of x."""
    return 1 < tokens <= few_rows.MOST_ROWS and wide_rows.reads(fmt, rows, columns, dtype)


def begin(
    weight: NarrowWeight,
    dtype: torch.dtype,
    *,
    bias: bool,
    act: Act | None = None,
    one: few_rows.Kind | None = None,
    around: Callable[[int], wide_rows.Around] | None = None,
) -> None:
    """Starts compiling this weight's kernels for up to 64 rows in other threads, if CUDA C++ serves it.

    act: activation of gated products. one: operations folded into products of a single row. around: returns
    operations folded into products of this many rows.
    """
    fmt, (rows, columns) = weight.format, weight.shape
    if not few_rows.serves(fmt, rows, columns, dtype):
        return
    kind = one or few_rows.Kind(one=True)
    few_rows.begin(fmt, columns, 1, dtype, warps_of_one(fmt, columns, rows), kind, bias=bias)
    processors = multiprocessors(weight.device)
    for tokens in (2, 9, 17, 33):
        tiles = few_rows.token_tiles(tokens)
        if takes_wide(fmt, tokens, rows, columns, dtype):
            folded = wide_rows.Around(act=act)
            if around is not None and tokens <= MOST_FOLDED:
                folded = around(tokens)
            wide = wide_cut(fmt, tiles, rows, columns, processors, folded)
            wide_rows.begin(fmt, tiles, dtype, wide_rows.compiled_as(wide), folded, bias=bias)
        elif shares_rows(fmt, tokens, rows, columns, dtype):
            cut = shared_rows.compiled_as(shares(fmt, rows, columns, processors))
            shared_rows.begin(fmt, tiles, dtype, cut, act, bias=bias)
        else:
            kind = few_rows.Kind(gated=act is not None, act=act or Act.SILU)
            few_rows.begin(fmt, 0, tiles, dtype, warps(fmt, tokens, rows, columns), kind, bias=bias)


def shares_rows(
    fmt: WeightFormat, tokens: int, rows: int, columns: int, dtype: torch.dtype
) -> bool:
    """Whether `shared_rows`, without `wgmma`, is the kernel for this number of rows of x, not `few_rows`.

    Measured with 16 and 32 rows on an H200: it is faster for 4 bits, unless a weight has few rows.
    """
    few = 8192 if tokens <= 16 else 4096
    wins = tokens > 32 or (fmt.code.bits == 4 and rows > few) or rows >= _MANY
    return tokens > _MOST_APART and wins and shared_rows.reads(fmt, rows, columns, dtype)


@cache
def wide_cut(
    fmt: WeightFormat,
    tiles: int,
    rows: int,
    columns: int,
    processors: int,
    around: wide_rows.Around = wide_rows.PLAIN,
) -> wide_rows.Cut:
    """Returns the cut of `wide_rows` for `tiles` tiles of 8 rows of x, as measured with Qwen3-8B on an H200.

    One program, or two small ones, run on each multiprocessor. The more rows of the weight a program takes,
    the fewer programs fetch the same rows of x.
    """
    deep = 4 if fmt.code.bits == 4 and tiles < 8 else 2
    groups = -(-columns // (few_rows.BLOCK * deep))
    warps, resident = 8, 1
    if tiles < 8 and rows > _FEW_OUTPUTS and not around.weighted:
        warps = 12
    elif tiles < 8 and rows <= _FEW_OUTPUTS and (fmt.code.bits == 4 or columns <= 8192):
        warps, resident = 4, 2
    stripes = -(-rows // (16 * warps))
    parts = max(1, min(resident * processors // stripes, groups // 2))
    return wide_rows.Cut(1, warps, 2, 4, parts, deep, resident)


@cache
def shares(fmt: WeightFormat, rows: int, columns: int, processors: int) -> Shares:
    """Returns the cut of `shared_rows`: up to three programs per multiprocessor, each with some blocks."""
    stripes, blocks = -(-rows // 128), -(-columns // few_rows.BLOCK)
    parts = max(1, min(8, 3 * processors // stripes, blocks // 4))
    return Shares(2, 4, 3, 1 if parts == 2 and fmt.code.bits == 8 else parts)


def few_serves(fmt: WeightFormat, rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether `few_rows` multiplies weights [rows, columns] here, and passed its check."""
    return few_rows.serves(fmt, rows, columns, dtype) and _proof(fmt, dtype) is None


@cache
def _proof(fmt: WeightFormat, dtype: torch.dtype) -> str | None:
    """Checks products of few rows against float64; returns None if they agree, else what is wrong."""
    generator = torch.Generator("cuda").manual_seed(0)
    columns = 3 * fmt.superblock or 640
    weight = encode(torch.randn(128, columns, device="cuda", generator=generator), fmt)
    begin(weight, dtype, bias=False)
    numbers = decode(weight, torch.float64)
    wrong = None
    try:
        for tokens in (1, 9, 17, 33):
            x = torch.randn(tokens, columns, device="cuda", generator=generator).to(dtype)
            found = _few(x, weight, None, None, multiprocessors(x.device)).to(torch.float64)
            expected = x.to(torch.float64) @ numbers.T
            error = float((found - expected).norm() / expected.norm())
            if not error < _MOST_ERROR:
                wrong = f"{tokens} rows are off by {error:.1e}"
    except RuntimeError as fault:
        wrong = str(fault)
    if wrong is not None:
        logger.warning("few rows times %s run in the general kernel: %s", fmt.summary, wrong)
    return wrong


@cache
def warps_of_one(fmt: WeightFormat, columns: int, rows: int = 0, weights: int = 1) -> Warps:
    """Returns the cut of `few_rows` for a single row, measured on an H200 for products of Qwen3-8B.

    weights: number of experts whose products are summed.
    """
    blocks = weights * -(-columns // few_rows.BLOCK)
    narrow = fmt.code.bits == 4
    if narrow and rows >= _MANY and blocks >= 16:
        return Warps(2, 4, 4)
    if rows > 0 and weights == 1 and blocks >= 32 and not few_rows.is_grouped(fmt):
        if narrow:
            return Warps(2, 8, 4 if rows <= _FEW_OUTPUTS else 2)
        if rows >= _MANY:
            return Warps(2, 8, 2)
        if rows <= _FEW_OUTPUTS:
            return Warps(2, 16, 2) if columns <= 8192 else Warps(1, 8, 4)
    if narrow and 0 < rows <= 4096 and weights == 1 and blocks >= 32:
        return Warps(2, 16, 2)
    many = weights > 1 or columns > 8192 or (rows >= _MANY and not narrow)
    count = min(16 if many else 8, blocks)
    few = count == 16 or (not narrow and rows > 4096)
    if weights > 1:
        # Gates and ups run before, and leave little room. For 8 experts of 2048 x 768, both products took
        # 17.1 us, and 17.6 with three blocks ahead.
        few = not narrow
    most = 2 if few else 4
    return Warps(1, count, min(most, -(-blocks // count)))


@cache
def warps(fmt: WeightFormat, tokens: int, rows: int, columns: int) -> Warps:
    """Returns the cut of `few_rows`: a warp takes more rows of the weight if more tokens share them.

    There remain enough programs to keep most multiprocessors busy.
    """
    most = 1 if tokens <= 8 else 2 if tokens <= 16 or tokens > 32 else 4
    if few_rows.is_grouped(fmt):  # sums of a group need registers, too
        most = 1 if tokens > 32 else min(most, 2)
    tiles = most
    while tiles > 1 and rows // (16 * tiles) < 120:
        tiles //= 2
    count = min(8 if tiles <= 2 else 4, -(-columns // few_rows.BLOCK))
    return Warps(tiles, count, 3)


@cache
def stripe(fmt: WeightFormat, rows: int, columns: int) -> Stripe:
    """Returns the cut of `one`: two rows of the weight per program."""
    block = min(2048, triton.next_power_of_2(columns))
    if fmt.columns != WHOLE:
        block = max(block, fmt.columns)
    return Stripe(2, block, 4)


@cache
def tiles(fmt: WeightFormat, tokens: int, rows: int, columns: int, processors: int) -> Tiles:
    """Returns the cut of `tiled`: splits columns until there are enough programs for the device."""
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
