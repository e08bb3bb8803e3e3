"""The torch definition of every weight format: `encode` and `decode` here define its bytes.

All arithmetic is float32, one IEEE operation at a time; rounding is to nearest even and saturates.

    codes    8 bits: uint8 [rows, columns], the code's bits. 4 bits: uint8 [rows, columns / 2]; in a run
             of inputs, byte j holds input j in its low half and input j + run / 2 in its high half. The
             run is the group. 6 bits: uint8 [rows, 3 columns / 4], first the low halves of 4 bits in runs
             of 32; then 8 bytes per run, where byte j holds the upper 2 bits of inputs j, j + 8, j + 16
             and j + 24, lowest first.
    scales   per matrix [1], per output [rows], per block [row blocks, column blocks], per group
             [groups, rows]: groups first, so that the scales of neighbouring outputs are neighbours.
    zeros    uint8 [groups, rows], or None. Those of 8 bits are the zero point + 128.
    order    int32 [columns], or None: the input that each column of the codes multiplies. Groups are
             neighbours among the codes' columns, not among inputs (act-order).
    offsets  like scales, or None. value = code * scale + offset.
    factors  float16 [1 or 2, superblocks, rows], or None: factors of scales, and of offsets, which they
             negate: value = code * (factor * scale) - factor * offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvant.kv.codecs import e2m1
from kvant.kv.codecs.float8 import FLOAT8
from kvant.kv.format import Encoding
from kvant.weights.format import WHOLE, Code, Scale, WeightFormat
from kvant.weights.rounding import RoundedRows, Rounding

TORCH_SCALE = {
    Scale.FLOAT32: torch.float32,
    Scale.FLOAT16: torch.float16,
    Scale.BFLOAT16: torch.bfloat16,
    Scale.E4M3: torch.uint8,
    Scale.E8M0: torch.uint8,
    Scale.UINT6: torch.uint8,
    Scale.INT8: torch.int8,
}

_E4M3 = FLOAT8[Encoding.E4M3FN]


@dataclass(frozen=True, slots=True, eq=False)
class NarrowWeight:
    """A weight [rows, columns] in its format's bytes; fields as in the module.

    global_scale: float32 [1], or None.
    """

    format: WeightFormat
    rows: int
    columns: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    global_scale: Tensor | None = None
    offsets: Tensor | None = None
    factors: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        found = (
            self.codes, self.scales, self.zeros, self.global_scale, self.offsets, self.factors,
            self.order,
        )  # fmt: skip
        return tuple(one for one in found if one is not None)

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class NarrowStack:
    """`count` weights of one shape and format, such as those of experts, stacked along rows.

    whole: [count * rows, columns].
    """

    whole: NarrowWeight
    count: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of weights, and rows and columns of each."""
        return self.count, self.whole.rows // self.count, self.whole.columns

    def one(self, index: int) -> NarrowWeight:
        """Returns a view of one weight [rows, columns]."""
        rows = self.shape[1]
        return rows_of(self.whole, index * rows, rows)


def pack_nibbles(codes: Tensor, run: int) -> Tensor:
    """Packs uint8 codes 0..15 [rows, columns] into uint8 [rows, columns / 2], as the module describes."""
    rows, columns = codes.shape
    parts = codes.view(rows, columns // run, 2, run // 2)
    return (parts[:, :, 0] | (parts[:, :, 1] << 4)).reshape(rows, columns // 2)


def unpack_nibbles(packed: Tensor, run: int) -> Tensor:
    """Reverses `pack_nibbles`: uint8 [rows, columns / 2] -> uint8 codes 0..15 [rows, columns]."""
    rows, half = packed.shape
    parts = packed.view(rows, 2 * half // run, run // 2)
    return torch.cat((parts & 15, parts >> 4), -1).view(rows, 2 * half)


_RUN = 32
"""Inputs in a run of 6-bit codes."""


def pack_six(codes: Tensor) -> Tensor:
    """Packs uint8 codes 0..63 [rows, columns] into uint8 [rows, 3 columns / 4], as the module describes."""
    rows, columns = codes.shape
    low = pack_nibbles(codes & 15, _RUN)
    high = (codes >> 4).view(rows, columns // _RUN, 4, _RUN // 4)
    packed = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    return torch.cat((low, packed.reshape(rows, columns // 4)), 1)


def unpack_six(packed: Tensor) -> Tensor:
    """Reverses `pack_six`: uint8 [rows, 3 columns / 4] -> uint8 codes 0..63 [rows, columns]."""
    rows, columns = packed.shape[0], packed.shape[1] * 4 // 3
    low = unpack_nibbles(packed[:, : columns // 2], _RUN)
    fields = packed[:, columns // 2 :].reshape(rows, columns // _RUN, _RUN // 4)
    high = torch.cat([(fields >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    return low | (high.view(rows, columns) << 4)


def encode(weight: Tensor, fmt: WeightFormat) -> NarrowWeight:
    """Rounds a weight [rows, columns] of finite numbers, in any float dtype, to a format.

    A scale is the block's largest magnitude over the largest code, rounded as it is stored; a block of
    zeros has the scale 1. With zero points a group spans its smallest and largest number, and zero. Raises
    ValueError if the format cannot store this shape. A weight without numbers has the scales of zeros.
    """
    rows, columns = weight.shape
    refusal = fmt.refuse(rows, columns)
    if refusal is not None:
        raise ValueError(refusal)
    wide = weight.to(torch.float32)
    if not weight.numel():
        return _encode_nothing(wide, fmt)
    if fmt.superblock:
        return _encode_superblocks(wide, fmt)
    if fmt.offsets:
        return _encode_offsets(wide, fmt)
    if fmt.zero_points:
        return _encode_asymmetric(wide, fmt)
    largest = _block_largest(wide, fmt)
    global_scale = None
    if fmt.scale is Scale.E8M0:
        # The OCP rule: the block's exponent minus that of the largest code (4 = 2^2).
        exponent = torch.floor(torch.log2(largest.clamp(min=2.0**-120))) - 2
        stored = (exponent + 127).clamp(0, 254).to(torch.uint8)
        stored = torch.where(largest > 0, stored, torch.full_like(stored, 127))
    elif fmt.global_scale:
        top = largest.amax()
        global_scale = torch.where(top > 0, top / (6.0 * 448.0), torch.ones_like(top)).view(1)
        stored = _E4M3.encode(largest / fmt.code.largest / global_scale)
        stored = stored.clamp(min=1)  # the smallest scale above zero
    else:
        scale = largest / fmt.code.largest
        if fmt.scale is Scale.FLOAT16:
            scale = scale.clamp(max=65504.0)
        stored = scale.to(TORCH_SCALE[fmt.scale])
        stored = torch.where(stored > 0, stored, torch.ones_like(stored))
    scaled = wide / _spread(_scale_values(stored, fmt, global_scale), fmt, rows, columns)
    if fmt.code is Code.E4M3:
        codes = _E4M3.encode(scaled)
    elif fmt.code is Code.E2M1:
        codes = pack_nibbles(e2m1.encode(scaled).to(torch.uint8), fmt.columns)
    else:
        most = fmt.code.largest
        rounded = torch.round(scaled).clamp_(-most - (fmt.code is Code.INT4), most)
        if fmt.code is Code.INT8:
            codes = rounded.to(torch.int8).view(torch.uint8)
        else:
            codes = pack_nibbles((rounded + 8).to(torch.uint8), fmt.columns)
    return NarrowWeight(
        fmt, rows, columns, codes.contiguous(), stored.contiguous(), None, global_scale
    )


def scale_shape(fmt: WeightFormat, rows: int, columns: int) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight [rows, columns]."""
    down, along = fmt.blocks(rows, columns)
    if fmt.rows == WHOLE:
        return (1,)
    if fmt.columns == WHOLE:
        return (rows,)
    return (along, down) if fmt.rows == 1 else (down, along)


def _encode_nothing(wide: Tensor, fmt: WeightFormat) -> NarrowWeight:
    """Encodes a weight without outputs or without inputs. Scales of its outputs or of the matrix are 1."""
    rows, columns = wide.shape
    shape, stored = scale_shape(fmt, rows, columns), TORCH_SCALE[fmt.scale]
    factors = (2 if fmt.offsets else 1, columns // (fmt.superblock or 1), rows)
    return NarrowWeight(
        fmt, rows, columns,
        wide.new_empty((rows, columns * fmt.code.bits // 8), dtype=torch.uint8),
        wide.new_ones(shape, dtype=stored),
        wide.new_zeros(shape, dtype=torch.uint8) if fmt.zero_points else None,
        wide.new_ones(1) if fmt.global_scale else None,
        wide.new_zeros(shape, dtype=stored) if fmt.offsets else None,
        wide.new_zeros(factors, dtype=torch.float16) if fmt.superblock else None,
    )  # fmt: skip


_MOST_AT_ONCE = 1 << 23
"""Numbers to round at once: 32 MiB in float32, in several temporary tensors."""


def encode_in_parts(weight: Tensor, fmt: WeightFormat) -> NarrowWeight:
    """Implements `encode` of weight [rows, columns] in parts, to save memory.

    Blocks must not span all rows.
    """
    assert fmt.rows != WHOLE
    assert not fmt.global_scale
    step = max(1, _MOST_AT_ONCE // (max(1, weight.shape[1]) * fmt.rows)) * fmt.rows
    return join([encode(part, fmt) for part in torch.split(weight, step)])


def encode_stack(weights: Tensor, fmt: WeightFormat) -> NarrowStack:
    """Rounds weights [count, rows, columns] of any floating dtype. No block spans two of them."""
    count, rows, columns = weights.shape
    if weights.is_contiguous() and rows % fmt.rows == 0:
        return NarrowStack(encode_in_parts(weights.view(count * rows, columns), fmt), count)
    return NarrowStack(join([encode_in_parts(one, fmt) for one in weights]), count)


def _encode_asymmetric(wide: Tensor, fmt: WeightFormat) -> NarrowWeight:
    rows, columns = wide.shape
    groups = wide.view(rows, -1, fmt.columns)
    low = groups.amin(-1).clamp(max=0.0).t()
    high = groups.amax(-1).clamp(min=0.0).t()
    scale = ((high - low) / 15.0).to(TORCH_SCALE[fmt.scale])
    scale = torch.where(scale > 0, scale, torch.ones_like(scale)).contiguous()
    zeros = torch.round(-low / scale.to(torch.float32)).clamp_(0, 15).to(torch.uint8)
    spread = _spread(scale.to(torch.float32), fmt, rows, columns)
    shifted = torch.round(wide / spread) + _spread(zeros.to(torch.float32), fmt, rows, columns)
    codes = pack_nibbles(shifted.clamp_(0, 15).to(torch.uint8), fmt.columns)
    return NarrowWeight(fmt, rows, columns, codes, scale, zeros.contiguous())


def _encode_offsets(wide: Tensor, fmt: WeightFormat) -> NarrowWeight:
    """Encodes groups between their smallest number, which is the offset, and their largest."""
    rows, columns = wide.shape
    groups = wide.view(rows, -1, fmt.columns)
    low, high = groups.amin(-1), groups.amax(-1)
    stored = TORCH_SCALE[fmt.scale]
    offset = low.to(stored)
    scale = ((high - low) / 15).to(stored)
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    shifted = (groups - offset.float()[..., None]) / divisor[..., None]
    codes = torch.round(shifted).clamp_(0, 15).to(torch.uint8).view(rows, columns)
    return NarrowWeight(
        fmt, rows, columns, pack_nibbles(codes, fmt.columns), scale.t().contiguous(),
        offsets=offset.t().contiguous(),
    )  # fmt: skip


def _encode_superblocks(wide: Tensor, fmt: WeightFormat) -> NarrowWeight:
    """Encodes groups whose scales and offsets are integers times their superblock's factors."""
    rows, columns = wide.shape
    groups = wide.view(rows, -1, fmt.columns)
    low = groups.amin(-1).clamp(max=0.0)
    if fmt.offsets:
        scale, most = (groups.amax(-1).clamp(min=0.0) - low) / 15, 63.0
    else:
        scale, most = groups.abs().amax(-1) / fmt.code.largest, 127.0

    def on_grid(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rounds values [rows, groups] to integers up to `most` times factors.

        Returns both, and the products.
        """
        blocks = values.view(rows, -1, fmt.superblock // fmt.columns)
        factor = (blocks.amax(-1) / most).to(torch.float16)
        divisor = torch.where(factor > 0, factor, torch.ones_like(factor)).float()[..., None]
        integers = torch.round(blocks / divisor).clamp_(0, most)
        there = (integers * factor.float()[..., None]).view(rows, -1, 1)
        return integers.view(rows, -1).t().contiguous(), factor.t().contiguous(), there

    stored, factor, step = on_grid(scale)
    offsets, factors, shifted = None, factor[None], groups
    if fmt.offsets:
        found, offset_factor, below = on_grid(-low)
        offsets, factors = found.to(torch.uint8), torch.stack((factor, offset_factor))
        shifted = groups + below
    codes = torch.round(shifted / torch.where(step > 0, step, torch.ones_like(step)))
    if fmt.code is Code.INT6:
        packed = pack_six((codes.clamp_(-32, 31) + 32).to(torch.uint8).view(rows, columns))
    else:
        packed = pack_nibbles(codes.clamp_(0, 15).to(torch.uint8).view(rows, columns), fmt.columns)
    return NarrowWeight(
        fmt,
        rows,
        columns,
        packed,
        stored.to(TORCH_SCALE[fmt.scale]),
        offsets=offsets,
        factors=factors,
    )


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds activations [T, columns] to e4m3: uint8 codes of this shape, float32 scales [T, 1].

    A row's scale is its largest magnitude over 448; a row of zeros has the scale 1.
    """
    wide = x.to(torch.float32)
    scales = wide.abs().amax(1, keepdim=True) / _E4M3.max
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return _E4M3.encode(wide / scales), scales


def round_by(x: Tensor, scale: Tensor) -> Tensor:
    """Divides activations [T, columns] by a scale, float32 [1]; returns e4m3 codes, uint8 of this shape."""
    return _E4M3.encode(x.to(torch.float32) / scale)


def round_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rounds each `group` numbers of x [T, columns] like `round_rows`.

    Returns codes, uint8 [T, columns], and scales, float32 [T, columns / group].
    """
    tokens, columns = x.shape
    codes, scales = round_rows(x.reshape(-1, group))
    return codes.view(tokens, columns), scales.view(tokens, columns // group)


def round_activations(x: Tensor, rounding: Rounding) -> RoundedRows:
    """Rounds x [T, columns], of any floating dtype, as `rounding` says."""
    if rounding.scale is not None:
        codes, scales = round_by(x, rounding.scale), rounding.scale
    elif rounding.group:
        codes, scales = round_groups(x, rounding.group)
    else:
        codes, scales = round_rows(x)
    return RoundedRows(codes.view(torch.float8_e4m3fn), scales, x.dtype, rounding.fast_sums)


def decode(weight: NarrowWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the weight's numbers [rows, columns], computed in float32 and rounded once to `dtype`."""
    fmt, rows, columns = weight.format, weight.rows, weight.columns
    if fmt.code is Code.E4M3:
        numbers = _E4M3.decode(weight.codes)
    elif fmt.code is Code.INT8:
        numbers = weight.codes.view(torch.int8).to(torch.float32)
        if weight.zeros is not None:
            numbers -= _spread(weight.zeros.to(torch.float32) - 128.0, fmt, rows, columns)
    elif fmt.code is Code.E2M1:
        codes = unpack_nibbles(weight.codes, fmt.columns)
        numbers = e2m1.values(codes.device)[codes.to(torch.int64)]
    elif fmt.code is Code.INT6:
        numbers = unpack_six(weight.codes).to(torch.float32) - 32.0
    else:
        numbers = unpack_nibbles(weight.codes, fmt.columns).to(torch.float32)
        if weight.zeros is not None:
            numbers -= _spread(weight.zeros.to(torch.float32), fmt, rows, columns)
        elif not fmt.offsets:
            numbers -= 8.0
    scale = _scale_values(weight.scales, fmt, weight.global_scale)
    if weight.factors is not None:
        scale = scale * _by_group(weight.factors[0], fmt)
    numbers = numbers * _spread(scale, fmt, rows, columns)
    if weight.offsets is not None:
        numbers += _spread(offset_values(weight), fmt, rows, columns)
    if weight.order is not None:
        numbers = torch.empty_like(numbers).index_copy_(1, weight.order.to(torch.int64), numbers)
    return numbers.to(dtype)


def offset_values(weight: NarrowWeight) -> Tensor:
    """Returns the offsets of a weight, float32 [groups, rows]. The weight must have offsets."""
    assert weight.offsets is not None
    found = weight.offsets.to(torch.float32)
    if weight.factors is None:
        return found
    return -(found * _by_group(weight.factors[1], weight.format))


def _by_group(factors: Tensor, fmt: WeightFormat) -> Tensor:
    """Repeats factors of superblocks [superblocks, rows] per group: float32 [groups, rows]."""
    return factors.to(torch.float32).repeat_interleave(fmt.superblock // fmt.columns, 0)


def can_join(parts: Sequence[NarrowWeight]) -> bool:
    """Whether weights have one format, width and order of inputs, no global scales, and blocks that end
    with each part.
    """
    first, *others = parts
    fmt, columns = first.format, first.columns
    if any(part.format != fmt or part.columns != columns for part in others):
        return False
    if not others:
        return True
    if not all(same_order(first.order, part.order) for part in others):
        return False
    return not fmt.global_scale and all(part.rows % max(1, fmt.rows) == 0 for part in parts[:-1])


def same_order(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two weights take their inputs in the same order, int32 [columns] or None."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def rows_of(weight: NarrowWeight, start: int, count: int) -> NarrowWeight:
    """Returns a view of `count` rows of a joined weight, which must begin and end with blocks."""
    fmt, scales, zeros = weight.format, weight.scales, weight.zeros
    assert fmt.rows != WHOLE
    if fmt.rows == 1 and fmt.columns != WHOLE:
        scales = scales[:, start : start + count]
        zeros = None if zeros is None else zeros[:, start : start + count]
    else:
        scales = scales[start // fmt.rows : -(-(start + count) // fmt.rows)]
    codes = weight.codes[start : start + count]
    offsets, factors = weight.offsets, weight.factors
    offsets = None if offsets is None else offsets[:, start : start + count]
    factors = None if factors is None else factors[:, :, start : start + count]
    return replace(
        weight,
        rows=count,
        codes=codes,
        scales=scales,
        zeros=zeros,
        offsets=offsets,
        factors=factors,
    )


def pick_rows(weight: NarrowWeight, rows: Tensor) -> NarrowWeight:
    """Copies some rows, by their indices [n] int64, of a weight in groups of inputs."""
    fmt = weight.format
    assert fmt.rows == 1
    assert fmt.columns != WHOLE
    zeros, offsets, factors = weight.zeros, weight.offsets, weight.factors
    return replace(
        weight, rows=len(rows), codes=weight.codes[rows], scales=weight.scales[:, rows],
        zeros=None if zeros is None else zeros[:, rows],
        offsets=None if offsets is None else offsets[:, rows],
        factors=None if factors is None else factors[:, :, rows],
    )  # fmt: skip


def join(parts: Sequence[NarrowWeight]) -> NarrowWeight:
    """Joins weights of the same input along rows; the result decodes to the same numbers.

    A scale per matrix becomes one per output. Raises ValueError for weights that `can_join` refuses.
    """
    first = parts[0]
    if not can_join(parts):
        raise ValueError("weights of different formats or inputs, or blocks that end inside a part")
    if len(parts) == 1:
        return first
    fmt = first.format
    if fmt.rows == WHOLE:
        parts = [per_output(part) for part in parts]
        fmt = parts[0].format
    across = 1 if fmt.rows == 1 and fmt.columns != WHOLE else 0
    zeros = [part.zeros for part in parts if part.zeros is not None]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    factors = [part.factors for part in parts if part.factors is not None]
    return NarrowWeight(
        fmt, sum(part.rows for part in parts), first.columns,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts], across),
        torch.cat(zeros, 1) if zeros else None,
        offsets=torch.cat(offsets, 1) if offsets else None,
        factors=torch.cat(factors, 2) if factors else None,
        order=first.order,
    )  # fmt: skip


def per_output(weight: NarrowWeight) -> NarrowWeight:
    """Returns a weight with one scale as a weight with an equal scale for each output."""
    assert weight.format.rows == WHOLE
    made = replace(weight.format, rows=1)
    scales = weight.scales.expand(weight.rows).contiguous()
    return replace(weight, format=made, scales=scales)


def _block_largest(wide: Tensor, fmt: WeightFormat) -> Tensor:
    """Returns the largest magnitude of each block of wide [rows, columns], in the shape of the scales."""
    rows, columns = wide.shape
    size = wide.abs()
    if fmt.rows == WHOLE:
        return size.amax().view(1)
    if fmt.columns == WHOLE:
        return size.amax(1)
    if fmt.rows == 1:
        return size.view(rows, -1, fmt.columns).amax(-1).t()
    down, along = fmt.blocks(rows, columns)
    padded = size.new_zeros(down * fmt.rows, along * fmt.columns)
    padded[:rows, :columns] = size
    return padded.view(down, fmt.rows, along, fmt.columns).amax((1, 3))


def _scale_values(stored: Tensor, fmt: WeightFormat, global_scale: Tensor | None) -> Tensor:
    """Returns stored scales as float32, times the global scale."""
    if fmt.scale is Scale.E4M3:
        found = _E4M3.decode(stored)
    elif fmt.scale is Scale.E8M0:
        found = torch.exp2(stored.to(torch.float32) - 127.0)
    else:
        found = stored.to(torch.float32)
    return found if global_scale is None else found * global_scale


def _spread(scales: Tensor, fmt: WeightFormat, rows: int, columns: int) -> Tensor:
    """Repeats scales of blocks so that they broadcast to [rows, columns]."""
    if fmt.rows == WHOLE:
        return scales.view(1, 1)
    if fmt.columns == WHOLE:
        return scales[:, None]
    if fmt.rows == 1:
        return scales.t().repeat_interleave(fmt.columns, 1)
    wide = scales.repeat_interleave(fmt.rows, 0)[:rows]
    return wide.repeat_interleave(fmt.columns, 1)[:, :columns]
