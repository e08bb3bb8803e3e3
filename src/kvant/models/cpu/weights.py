"""Arranges weights for products on a CPU: 16 outputs are adjacent, so that no sum crosses lanes.

`kvant.weights` defines the formats; this file only reorders bytes. A tile has 16 outputs; the last tile is
padded with zeros. A block has 32 inputs, as vectors of 64 bytes, four inputs for each output:

    8 bits   8 vectors; vector s has inputs 4 s .. 4 s + 3, code + 128
    4 bits   4 vectors; vector v has inputs 4 v .. in its low halves, 16 + 4 v .. in its high halves
    6 bits   the same of the low halves, and 2 vectors of upper bits: field k of 2 bits in vector u belongs to
             inputs 16 u + 4 k ..

The codes of all blocks are followed by scales, offsets and factors, each [block, group or superblock, 16].
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from kvant.kernels.cpu.threads import openmp_address
from kvant.models.cpu.info import GROUP, TILE
from kvant.weights.codecs import (
    NarrowWeight,
    decode,
    encode,
    pack_nibbles,
    pack_six,
    rows_of,
    unpack_nibbles,
    unpack_six,
)
from kvant.weights.format import BLOCK_TYPES, INT8_CHANNEL, Scale, WeightFormat
from kvant.weights.format import Code as Bits


class Code(IntEnum):
    """A format of weights that has a product. Compiled code contains the number."""

    FLOAT32 = 0
    INT8 = 1  # one scale an output
    Q8_0 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q4_K = 5
    Q6_K = 6
    INT4_32 = 7  # 4 bits, with a float32 scale and offset for 32 inputs, 64 or 128
    INT4_64 = 8
    INT4_128 = 9
    BFLOAT16 = 10  # numbers, which are exact in float32

    @property
    def is_number(self) -> bool:
        """Whether weights are numbers in their rows, and not codes in tiles."""
        return self in (Code.FLOAT32, Code.BFLOAT16)

    @property
    def format(self) -> WeightFormat:
        """The format of a narrow weight."""
        assert not self.is_number
        columns = {Code.INT4_32: 32, Code.INT4_64: 64, Code.INT4_128: 128}.get(self)
        if columns is not None:
            return WeightFormat("int4", Bits.INT4, 1, columns, Scale.FLOAT32, offsets=True)
        return INT8_CHANNEL if self is Code.INT8 else BLOCK_TYPES[self.name].format

    @property
    def bits(self) -> int:
        return self.format.code.bits


INT4 = Code.Q4_1
"""The format of `--quantization int4`: a scale and an offset for 32 inputs."""

_OF_FORMAT = {code.format: code for code in Code if not code.is_number}
_NUMBERS = {torch.float32: Code.FLOAT32, torch.bfloat16: Code.BFLOAT16}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """codes: float32 or bfloat16 [rows, columns], or tiles, uint8 [tiles, bytes of a tile].

    scales: float32 [tiles * 16] where an output has one scale, else None. order: as in `NarrowWeight`.
    """

    code: Code
    codes: Tensor
    scales: Tensor | None
    rows: int
    columns: int
    order: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        parts = [part for part in (self.codes, self.scales, self.order) if part is not None]
        return sum(part.numel() * part.element_size() for part in parts)


def pack(weight: Tensor, code: Code | None) -> PackedWeight:
    """weight: float32 or of 16 bits [rows, columns], columns a multiple of 32.

    code: what its numbers are rounded to, as the format's codec does. Numbers stay as they are, for
    None or for a code that is theirs, and are not copied if their rows are contiguous.
    """
    rows, columns = weight.shape
    assert columns % GROUP == 0
    own = _NUMBERS.get(weight.dtype)
    if own is not None and code in (None, own):
        return PackedWeight(own, weight.contiguous(), None, rows, columns)
    assert code is not None
    return pack_rounded((weight,), code)


def pack_rounded(weights: Sequence[Tensor], code: Code) -> PackedWeight:
    """Rounds weights [.., columns] of one product, float32 or of 16 bits, and joins their rows in order.

    Few rows at a time are wide outside `weights`: peak memory is little more than the result.
    """
    rows, columns = sum(len(one) for one in weights), weights[0].shape[1]
    made = _empty(code, rows, columns)
    _fill(made, lambda start, count: encode(_joined_rows(weights, start, count), code.format))
    return made


def _joined_rows(weights: Sequence[Tensor], start: int, count: int) -> Tensor:
    """Returns `count` rows from `start` of the joined weights: a view if one weight has them all."""
    found = []
    for one in weights:
        found.append(one[max(0, start) : max(0, start + count)])
        start -= len(one)
    found = [one for one in found if len(one)]
    return found[0] if len(found) == 1 else torch.cat(found)


def with_offsets(weight: NarrowWeight) -> NarrowWeight:
    """Returns 4-bit codes with float32 scales and offsets instead of zero points. Decoded values are equal.

    Scales of 16 bits have at most 11 significant bits: with four more of a code, products and offsets are
    exact in float32. Products with float32 scales are rounded to it once.
    """
    fmt = weight.format
    scales = weight.scales.to(torch.float32)
    zeros = 8.0 if weight.zeros is None else weight.zeros.to(torch.float32)
    made = replace(fmt, scale=Scale.FLOAT32, zero_points=False, offsets=True)
    return replace(weight, format=made, scales=scales, zeros=None, offsets=-scales * zeros)


def pack_narrow(weight: NarrowWeight) -> PackedWeight:
    """Arranges a narrow weight's bytes in tiles. 4-bit codes in groups get offsets (`with_offsets`)."""
    if weight.format not in _OF_FORMAT:
        weight = with_offsets(weight)
    order = None if weight.order is None else weight.order.clone()
    made = _empty(_OF_FORMAT[weight.format], weight.rows, weight.columns, order)
    _fill(made, partial(rows_of, weight))
    return made


def _empty(code: Code, rows: int, columns: int, order: Tensor | None = None) -> PackedWeight:
    """Allocates tiles for a weight in a narrow format."""
    tiles = -(-rows // TILE)
    size = columns // GROUP * code_bytes(code)
    scales = None
    if code is Code.INT8:
        scales = torch.zeros(tiles * TILE, dtype=torch.float32)
    else:
        size += sum(count * TILE * kind.itemsize for count, kind in _beside(code, columns))
    codes = torch.empty(tiles, size, dtype=torch.uint8)
    return PackedWeight(code, codes, scales, rows, columns, order)


def _fill(made: PackedWeight, rows: Callable[[int, int], NarrowWeight]) -> None:
    """Writes all rows of `made`, in parts of whole tiles. rows(start, count): returns some of them."""
    step = max(1, _MOST_AT_ONCE // (made.columns * TILE)) * TILE

    def work(start: int) -> None:
        _put(made, start, rows(start, min(step, made.rows - start)))

    workers = min(_MOST_WORKERS, torch.get_num_threads())
    with ThreadPoolExecutor(workers, "kvant-pack", _run_alone) as pool:
        list(pool.map(work, range(0, made.rows, step)))


def _run_alone() -> None:
    """Makes torch's operations in this thread use no other thread.

    Threads that share each operation on a part would wait for each other longer than they compute.
    `torch.set_num_threads` would change the number for threads that start later, too.
    """
    torch.get_num_threads()  # else torch would set this thread's number at its first operation
    address = openmp_address("omp_set_num_threads")
    if address:
        ctypes.CFUNCTYPE(None, ctypes.c_int)(address)(1)


def _put(made: PackedWeight, start: int, weight: NarrowWeight) -> None:
    """Writes a narrow weight into the tiles of `made` that begin with row `start`."""
    beside = [one for one in (weight.scales, weight.offsets) if one is not None]
    if weight.factors is not None:
        beside += list(weight.factors)
    if made.scales is not None:
        beside, made.scales[start : start + weight.rows] = [], weight.scales
    blocks = made.columns // GROUP
    sizes = [
        blocks * code_bytes(made.code),
        *(len(one) * TILE * one.element_size() for one in beside),
    ]
    tiles = made.codes[start // TILE :][: -(-weight.rows // TILE)]
    codes, *places = torch.split(tiles, sizes, 1)
    vectors = codes.view(torch.int32).view(len(tiles), blocks, -1, TILE)
    vectors.copy_(_vectors(made.code, _in_tiles(weight.codes)))
    for place, one in zip(places, beside, strict=True):
        place.view(one.dtype).view(len(tiles), -1, TILE).copy_(_in_tiles(one.t()).transpose(1, 2))


def unpack(weight: PackedWeight) -> Tensor:
    """Returns the decoded weight that products use, float32 [rows, columns]."""
    if weight.code.is_number:
        return weight.codes.to(torch.float32)
    return decode(narrow_of(weight))


def narrow_of(weight: PackedWeight) -> NarrowWeight:
    """Does the inverse of `pack_narrow`."""
    code, rows, columns, tiles = weight.code, weight.rows, weight.columns, weight.codes.shape[0]
    fmt, blocks = code.format, columns // GROUP
    end = blocks * code_bytes(code)
    numbers = _codes_of_tiles(code, weight.codes[:, :end].reshape(tiles, blocks, -1))
    numbers = numbers.reshape(tiles * TILE, columns)[:rows]
    if code.bits == 8:
        codes = numbers ^ 0x80
    else:
        codes = pack_six(numbers) if code.bits == 6 else pack_nibbles(numbers, fmt.columns)
    if code is Code.INT8:
        assert weight.scales is not None
        return NarrowWeight(fmt, rows, columns, codes, weight.scales[:rows])
    found = []
    for size, kind in _beside(code, columns):
        part = weight.codes[:, end : end + size * TILE * kind.itemsize].contiguous()
        end += size * TILE * kind.itemsize
        wide = part.view(kind).view(tiles, size, TILE).transpose(0, 1)
        found.append(wide.reshape(size, tiles * TILE)[:, :rows].contiguous())
    scales = found.pop(0)
    offsets = found.pop(0) if fmt.offsets else None
    factors = torch.stack(found) if found else None
    return NarrowWeight(
        fmt, rows, columns, codes, scales, offsets=offsets, factors=factors, order=weight.order
    )


def code_bytes(code: Code) -> int:
    """Returns the bytes of the codes of 16 outputs and 32 inputs."""
    return TILE * GROUP * code.bits // 8


def _beside(code: Code, columns: int) -> list[tuple[int, torch.dtype]]:
    """Returns the arrays after the codes: for each, its number of vectors of 16, and their dtype."""
    fmt = code.format
    scale = {1: torch.uint8, 2: torch.float16, 4: torch.float32}[fmt.scale.num_bytes]
    if code is Code.Q6_K:
        scale = torch.int8
    found = [(columns // fmt.columns, scale)] * (2 if fmt.offsets else 1)
    if fmt.superblock:
        found += [(columns // fmt.superblock, torch.float16)] * len(found)
    return found


_MOST_AT_ONCE = 1 << 18
"""Most numbers of a part: 1 MiB in float32. A part's temporary tensors stay in a core's cache."""

_MOST_WORKERS = 8
"""Most threads that pack parts. Each has up to 4 MiB of temporary tensors."""


def _in_tiles(rows: Tensor) -> Tensor:
    """Returns [rows, ..] as [tiles, 16, ..]; pads the last tile with zeros."""
    missing = -len(rows) % TILE
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    return rows.view(-1, TILE, *rows.shape[1:])


def _vectors(code: Code, codes: Tensor) -> Tensor:
    """Arranges codes, uint8 [tiles, 16, bytes of a row], in vectors: int32 [tiles, blocks, vectors, 16].

    An int32 is the four bytes of one output.
    """
    if code.bits == 8:
        fours = (codes ^ 0x80).view(torch.int32)
        return fours.view(len(codes), TILE, -1, 8).permute(0, 2, 3, 1)
    if code.bits == 4 and code.format.columns == GROUP:
        # A byte already holds the inputs i and i + 16 of a block.
        return codes.view(torch.int32).view(len(codes), TILE, -1, 4).permute(0, 2, 3, 1)
    rows = codes.flatten(0, 1)
    numbers = unpack_six(rows) if code.bits == 6 else unpack_nibbles(rows, code.format.columns)
    steps = numbers.view(len(codes), TILE, -1, 2, 4, 4).permute(3, 0, 2, 4, 1, 5)  # halves first
    low = steps & 15
    packed = low[0] | (low[1] << 4)
    if code.bits == 6:
        high = (steps >> 4).unbind(3)
        fields = high[0] | (high[1] << 2) | (high[2] << 4) | (high[3] << 6)
        packed = torch.cat((packed, fields.permute(1, 2, 0, 3, 4)), 2)
    return packed.contiguous().view(torch.int32).squeeze(-1)


def _codes_of_tiles(code: Code, tiled: Tensor) -> Tensor:
    """Does the inverse of `_vectors`: returns codes 0..2^bits - 1, uint8 [tiles, 16, blocks, 32]."""
    tiles, blocks = tiled.shape[:2]
    if code.bits == 8:
        return tiled.view(tiles, blocks, 8, TILE, 4).permute(0, 3, 1, 2, 4).reshape(tiles, TILE, -1)
    packed = tiled[..., : 4 * 64].reshape(tiles, blocks, 4, TILE, 4)
    steps = torch.stack((packed & 15, packed >> 4), 2)
    if code.bits == 6:
        fields = tiled[..., 4 * 64 :].reshape(tiles, blocks, 2, TILE, 4)
        high = torch.stack([(fields >> shift) & 3 for shift in (0, 2, 4, 6)], 3)
        steps = steps | (high << 4)
    return steps.permute(0, 4, 1, 2, 3, 5).reshape(tiles, TILE, -1)
