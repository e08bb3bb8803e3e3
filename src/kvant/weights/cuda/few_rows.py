"""Launches `few_rows.cu`: products of up to 64 rows with narrow weights on Hopper.

It reads weights at nearly memory speed. Where it does not build, Triton's kernels run instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kvant.kernels.cuda import build
from kvant.kernels.cuda.build import FLOAT, INT, POINTER, Kernel
from kvant.weights.codecs import NarrowWeight
from kvant.weights.format import Q4_1, Q4_K, Q6_K, WHOLE, Code, Scale, WeightFormat

MOST_ROWS = 64
BLOCK = 128
"""Columns per step; also the size of the groups and blocks whose scales the kernel reads."""

GROUPS = {(1, 32), (1, 64)}
"""Rows and columns of groups that a matrix instruction takes singly, if codes are integers."""

_BLOCKS = (Q4_1, Q4_K, Q6_K)

_LISTED_WARPS = 16
"""Warps of listed experts in e2m1 that find room in a multiprocessor's registers; 20 and 24 were slower."""

SOURCES = "decode.cuh", "few_rows.cu"
_CODES = {Code.E4M3: 0, Code.INT8: 1, Code.INT4: 2, Code.E2M1: 3, Code.INT6: 4}
_SCALES = {
    Scale.FLOAT32: 0, Scale.FLOAT16: 1, Scale.BFLOAT16: 2, Scale.E8M0: 3, Scale.UINT6: 4, Scale.INT8: 5,
}  # fmt: skip
SCALE_SIZES = {place: scale.num_bytes for scale, place in _SCALES.items()}
ARGUMENTS = (*[POINTER] * 14, *[INT] * 7, *[FLOAT] * 4)


class Pairs(Enum):
    """Which experts' weights a program multiplies by; a pair is one token with one of its experts."""

    NONE = 0  # a linear layer
    LISTED = 1  # an expert with all its pairs
    ALONE = 2  # the expert of one pair
    SUMMED = 3  # all experts of one token, as the weighted sum


class Act(Enum):
    """Activations of gates in the kernel."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2


@dataclass(frozen=True, slots=True)
class Warps:
    """How a product is cut.

    tiles: of 16 weight rows per warp. warps: per program. ahead: blocks prefetched per warp.
    """

    tiles: int
    warps: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Routed:
    """How programs choose a token's experts by its logits.

    experts: their number. first: weights are a softmax of all logits, not of the chosen ones. renormalise:
    weights are divided by their sum. rounded: to 16 bits.
    """

    experts: int
    first: bool
    renormalise: bool
    rounded: bool


@dataclass(frozen=True, slots=True)
class Kind:
    """Operations that the kernel adds to a product; each field is a macro of `few_rows.cu`.

    one: a single row of x, staged in shared memory. norm: the row is normalised first; plus: by 1 + weight.
    gated: rows of the weight are gates and ups, activated by act. added: the result is added to a residual.
    share: results of pairs are weighted. top_k: experts per token, for SUMMED. routed: experts are chosen
    here, for ALONE and SUMMED; None if they are given.
    """

    one: bool = False
    norm: bool = False
    plus: bool = False
    gated: bool = False
    alternating: bool = False
    act: Act = Act.SILU
    added: bool = False
    pairs: Pairs = Pairs.NONE
    top_k: int = 1
    share: bool = False
    routed: Routed | None = None


PLAIN = Kind()


@dataclass(frozen=True, slots=True)
class Beside:
    """Tensors of a launch other than x and the weight. The kernel reads only what its `Kind` needs.

    norm_weight: [columns]. residual: [tokens, width]. ids: int32 and shares: float32 [tokens, top_k].
    lists: int32 [experts, most], counts: int32 [experts]. limit, alpha: of a clamped activation. logits:
    [tokens, experts], 16 bits; factor multiplies the weights of experts that are chosen by them.
    """

    norm_weight: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    ids: Tensor | None = None
    shares: Tensor | None = None
    lists: Tensor | None = None
    counts: Tensor | None = None
    limit: float = 0.0
    alpha: float = 0.0
    top_k: int = 1
    logits: Tensor | None = None
    factor: float = 1.0


NOTHING = Beside()


def serves(fmt: WeightFormat, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernel reads weights [rows, columns] on this device. The answer never changes.

    rows: of one expert, if the weight has several.
    """
    return reads(fmt, rows, columns, dtype) and build.available(
        "products with narrow weights run in the general kernels"
    )


def reads(fmt: WeightFormat, rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernel reads weights [rows, columns] on any Hopper GPU."""
    if fmt.code is Code.E2M1:
        known = fmt.scale is Scale.E8M0 and fmt.columns == 32 and dtype is torch.bfloat16
        return known and fmt.rows == 1 and rows % 16 == 0 and columns % 32 == 0
    if fmt in _BLOCKS:
        return rows % 16 == 0 and columns % (fmt.superblock or fmt.columns) == 0
    shared = (fmt.rows, fmt.columns)
    shares = {(1, WHOLE), (1, BLOCK), (BLOCK, BLOCK)}
    if shared in GROUPS and fmt.code in (Code.INT4, Code.INT8):
        plain = not (fmt.zero_points or fmt.offsets or fmt.superblock or fmt.global_scale)
        known = plain and fmt.scale in (Scale.FLOAT16, Scale.BFLOAT16)
        return known and rows % 16 == 0 and columns % fmt.columns == 0
    return (
        fmt.scale in _SCALES
        and fmt.scale is not Scale.E8M0
        and shared in shares
        and (shared[0] == 1 or rows % BLOCK == 0 or rows % 16 == 0)
        and (shared != (1, WHOLE) or fmt.scale is Scale.FLOAT32)
        and not fmt.global_scale
        and columns % (64 if shared == (1, WHOLE) else BLOCK) == 0
        and rows % 16 == 0
    )


def is_grouped(fmt: WeightFormat) -> bool:
    """Whether an instruction takes columns of one group, because a block of columns has several groups."""
    return fmt.rows == 1 and 0 < fmt.columns < BLOCK and fmt.code is not Code.E2M1


def defines(
    fmt: WeightFormat,
    columns: int,
    tiles: int,
    dtype: torch.dtype,
    cut: Warps,
    kind: Kind = PLAIN,
    *,
    bias: bool = False,
    ahead: bool = True,
) -> dict[str, int | str]:
    """Returns the macros of `few_rows.cu`. tiles: of 8 tokens. ahead: may overlap the previous launch.

    columns: of the weight; compiled in for a single row and for listed experts in e2m1.
    """
    routed = kind.routed or Routed(0, first=False, renormalise=False, rounded=False)
    scales = {(1, WHOLE): 0, (BLOCK, BLOCK): 2}.get((fmt.rows, fmt.columns), 1)
    by_blocks = (fmt.rows, fmt.columns) == (1, BLOCK) and fmt.code is Code.INT4
    bare = kind.one and kind.pairs is Pairs.NONE and by_blocks and columns % BLOCK == 0
    listed = kind.pairs is Pairs.LISTED and fmt.code is Code.E2M1
    resident = _LISTED_WARPS // cut.warps if listed and tiles == 1 else 0
    return {
        "CODE": _CODES[fmt.code], "SCALES": scales, "GROUP": fmt.columns if scales == 1 else BLOCK,
        "SCALE_TYPE": _SCALES[fmt.scale], "ZEROS": int(fmt.zero_points), "BIAS": int(bias),
        "OFFSETS": int(fmt.offsets), "SUPER": fmt.superblock,
        "BFLOAT16": int(dtype is torch.bfloat16), "NT": tiles, "RT": cut.tiles,
        "WARPS": cut.warps, "STAGES": cut.ahead, "K": columns if kind.one or listed else "inputs",
        "ONE": int(kind.one), "NEIGHBOURS": 0,
        "NORM": int(kind.norm) * (2 if kind.plus else 1), "GATED": int(kind.gated),
        "ALTERNATING": int(kind.alternating),
        "ACTIVATION": kind.act.value, "ADDED": int(kind.added), "EXPERTS": kind.pairs.value,
        "TOP_K": kind.top_k, "SHARE": int(kind.share), "PDL": int(ahead),
        "ROUTED": routed.experts, "SOFTMAX_FIRST": int(routed.first),
        "RENORMALISE": int(routed.renormalise), "ROUNDED_SHARES": int(routed.rounded),
        "BARE": int(bare), "RESIDENT": resident,
    }  # fmt: skip


def shared_bytes(macros: Mapping[str, int | str]) -> int:
    """Returns the bytes of dynamic shared memory of a program, as `few_rows.cu` computes them from macros."""
    m = {name: int(value) for name, value in macros.items() if value != "inputs"}
    tiles, warps = m["RT"], m["WARPS"]
    pieces = 1 if m["CODE"] >= 2 else 2
    size = SCALE_SIZES[m["SCALE_TYPE"]]
    if m["SCALES"] == 2:
        scales = 16
    elif m["SCALES"] == 0:
        scales = 64 * tiles if m["EXPERTS"] == 3 else 0
    else:
        scales = max(1, BLOCK // m["GROUP"]) * 16 * tiles * size
    slot = tiles * 2 * pieces * 512 + scales + (16 * tiles if m["ZEROS"] else 0)
    slot += scales if m["OFFSETS"] else 0
    slot += (64 if m["OFFSETS"] else 32) * tiles if m["SUPER"] else 0
    slot += 512 * tiles if m["CODE"] == _CODES[Code.INT6] else 0
    sums = warps * 16 * tiles * (4 if m["ONE"] else 32 * m["NT"])
    staged = 0
    if m["ONE"]:
        staged = 2 * m["K"] * (m["TOP_K"] if m["EXPERTS"] == 3 else 1)
        staged += m["K"] // 16 if m["BARE"] else 0  # two sums of a block of 128 columns
    return max(warps * m["STAGES"] * slot, sums) + staged


def token_tiles(tokens: int) -> int:
    """Returns the number of tiles of 8 tokens in a program."""
    return next(count for count in (1, 2, 4, 8) if tokens <= 8 * count or count == 8)


@functools.cache
def kernel(
    fmt: WeightFormat,
    columns: int,
    tiles: int,
    dtype: torch.dtype,
    cut: Warps,
    kind: Kind = PLAIN,
    *,
    bias: bool = False,
) -> Kernel:
    """Returns the kernel for `tiles` tiles of 8 tokens. Raises RuntimeError if it does not compile."""
    macros = defines(fmt, columns, tiles, dtype, cut, kind, bias=bias)
    size = shared_bytes(macros)
    return build.build(__package__, SOURCES, "few_rows", macros, size, ARGUMENTS)


def begin(
    fmt: WeightFormat,
    columns: int,
    tiles: int,
    dtype: torch.dtype,
    cut: Warps,
    kind: Kind = PLAIN,
    *,
    bias: bool = False,
) -> None:
    """Starts compiling the kernel that `kernel` returns for these arguments, in another thread."""
    macros = defines(fmt, columns, tiles, dtype, cut, kind, bias=bias)
    build.begin(__package__, SOURCES, macros)


def multiply(
    x: Tensor,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: Warps,
    kind: Kind = PLAIN,
    beside: Beside = NOTHING,
    *,
    experts: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies x [T, columns], bfloat16 or float16, contiguous, by a weight; returns [T, rows].

    The format must be one that `serves` accepts. bias: [rows] or None. With gated the result has rows / 2
    columns; with pairs, one row per pair or, for SUMMED, per token. experts: number of stacked weights. out:
    contiguous, with the result's shape; the result is written there if given.
    """
    call = arranged(x, weight, bias, cut, kind, beside, experts=experts, out=out)
    built = kernel(
        weight.format, weight.columns, call.tiles, x.dtype, cut, kind, bias=bias is not None
    )
    built.launch(call.programs, cut.warps * 32, call.values, ahead=True)
    return call.out


@dataclass(frozen=True, slots=True)
class Call:
    """A launch: its result, tiles of 8 tokens, number of programs (across, down), and arguments."""

    out: Tensor
    tiles: int
    programs: tuple[int, int]
    values: tuple[int | float, ...]


def arranged(
    x: Tensor,
    weight: NarrowWeight,
    bias: Tensor | None,
    cut: Warps,
    kind: Kind,
    beside: Beside,
    *,
    experts: int = 1,
    out: Tensor | None = None,
) -> Call:
    """Returns the launch of `multiply` for x [T, columns], without running it. Arguments: as there."""
    rows = weight.rows // experts
    width = rows // 2 if kind.gated else rows
    tokens, down, tiles, most = x.shape[0], 1, 1, 0
    results = tokens
    if kind.pairs is not Pairs.NONE:
        chosen = beside.ids if kind.routed is None else beside.logits
        assert chosen is not None
        pairs = len(chosen) * beside.top_k
        results = pairs
        if kind.pairs is Pairs.LISTED:
            assert beside.lists is not None
            down, most = experts, beside.lists.shape[1]
            tiles = token_tiles(min(most, max(8, 2 * pairs // experts)))
        elif kind.pairs is Pairs.ALONE:
            down = pairs
        else:
            down = results = len(chosen)
    elif not kind.one:
        tiles = token_tiles(tokens)
    out = x.new_empty(results, width) if out is None else out
    side = -(-tokens // (8 * tiles)) if kind.pairs is Pairs.NONE and not kind.one else 1
    across = side * -(-width // ((8 if kind.gated else 16) * cut.tiles))
    stride = weight.scales.stride(0) if weight.scales.ndim > 1 else 0
    values = (
        *(address(one) for one in (
            weight.codes, weight.scales, weight.offsets if weight.zeros is None else weight.zeros,
            weight.factors, x, bias, beside.norm_weight, beside.residual, out,
            beside.lists, beside.counts, beside.ids, beside.shares, beside.logits,
        )),
        tokens, rows, side, stride, most, beside.top_k, weight.columns,
        beside.eps, beside.limit, beside.alpha, beside.factor,
    )  # fmt: skip
    return Call(out, tiles, (across, down), values)


def address(tensor: Tensor | None) -> int:
    """Returns the address of a tensor [..], 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
