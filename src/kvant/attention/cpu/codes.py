"""Decoders from codes to float32 lanes that several encodings share.

See `kvant.attention.cpu.format.Codes`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from kvant.attention.cpu.format import Codes
from kvant.kernels.cpu.vector import (
    F32,
    FLOATS,
    HALVES,
    I8,
    I16,
    I32,
    LANES,
    SHORTS,
    WORDS,
    call,
    every,
    i64,
    load,
    look_up,
    shuffle,
    splat,
    words,
)  # fmt: skip

_HALF = every(SHORTS, 0x7FFF)


def wide(
    bits: int,
    unpack: Callable[[Any, Any], list[Any]],
    vector: Callable[[Any, Any], Any],
    *,
    marks_nan: bool = False,
) -> Codes:
    """Returns the decoder for codes of 8 bits and more. unpack(b, words): numbers of one word of 16 rows.

    vector(b, address): 16 neighbouring numbers of a row.
    """

    def chunk(context: Any, b: Any, address: Any, vectors: int) -> list[Any]:
        starts = (b.add(address, i64(v * LANES * bits // 8)) for v in range(vectors))
        return [vector(b, start) for start in starts]

    return Codes(bits, lambda context, b, group: unpack(b, group[0]), chunk, marks_nan=marks_nan)


@cache
def packed(bits: int, table: tuple[float, ...] | None = None, *, in_blocks: bool = False) -> Codes:
    """Returns the decoder for codes of 2 to 4 bits.

    table: each code's number, repeated to 8 or 16 entries; None if a code is its number.
    """

    def number(context: Any, b: Any, index: Any) -> Any:
        if table is not None:
            return look_up(context, b, table, index)
        return b.sitofp(index, FLOATS)

    def unpack(context: Any, b: Any, group: list[Any]) -> list[Any]:
        found = []
        for position in range(0, 32 * len(group), bits):
            word, shift = divmod(position, 32)
            index = b.lshr(group[word], words(shift)) if shift else group[word]
            if shift + bits > 32:
                index = b.or_(index, b.shl(group[word + 1], words(32 - shift)))
            found.append(number(context, b, b.and_(index, words((1 << bits) - 1))))
        return found

    def nibbles(context: Any, b: Any, address: Any, vectors: int) -> list[Any]:
        n = 8 * vectors
        pairs = b.zext(load(b, ir.VectorType(I8, n), address), ir.VectorType(I32, n))
        low = b.and_(pairs, every(pairs.type, 15))
        high = b.lshr(pairs, every(pairs.type, 4))
        if vectors == 2:
            return [number(context, b, index) for index in (low, high)]
        return [number(context, b, shuffle(b, low, high, list(range(16))))]

    def threes(context: Any, b: Any, address: Any, vectors: int) -> list[Any]:
        """Reads 6 bytes for 16 numbers, 12 for 32."""
        if vectors == 2:
            units = load(b, ir.VectorType(I32, 3), address)
        else:
            low_word = load(b, I32, address)
            high_word = b.zext(load(b, I16, b.add(address, i64(4))), I32)
            units = ir.Constant(ir.VectorType(I32, 3), [0, 0, 0])
            units = b.insert_element(units, low_word, ir.Constant(I32, 0))
            units = b.insert_element(units, high_word, ir.Constant(I32, 1))
        found = []
        for v in range(vectors):
            starts = [3 * (LANES * v + lane) for lane in range(LANES)]
            first = shuffle(b, units, units, [start >> 5 for start in starts])
            last = shuffle(b, units, units, [(start + 2) >> 5 for start in starts])
            amounts = ir.Constant(WORDS, [start & 31 for start in starts])
            index = call(b, "llvm.fshr.v16i32", WORDS, last, first, amounts)
            found.append(number(context, b, b.and_(index, words(7))))
        return found

    def fours(context: Any, b: Any, address: Any, vectors: int) -> list[Any]:
        """Reads 4 bytes for 16 numbers."""
        amounts = ir.Constant(WORDS, [2 * lane for lane in range(LANES)])
        found = []
        for v in range(vectors):
            unit = splat(b, load(b, I32, b.add(address, i64(4 * v))))
            found.append(number(context, b, b.and_(b.lshr(unit, amounts), words(3))))
        return found

    if bits == 2:
        return Codes(2, unpack, fours, in_blocks=in_blocks)
    if bits == 4:
        return Codes(4, unpack, nibbles, in_blocks=in_blocks)
    return Codes(
        3, unpack, threes, group=3, in_blocks=in_blocks
    )  # a code ends at the end of every third word only


def unpack_bytes(b: Any, x: Any) -> list[Any]:
    """Returns the four bytes of WORDS, each in the upper half of SHORTS."""
    low, high = b.trunc(x, SHORTS), b.trunc(b.lshr(x, words(16)), SHORTS)
    top = every(SHORTS, 8)
    bytes_ = [b.shl(low, top), low, b.shl(high, top), high]
    upper = every(SHORTS, 0xFF00 - (1 << 16))
    return [b.and_(y, upper) for y in bytes_]


def load_bytes(b: Any, address: Any) -> Any:
    """Loads 16 bytes of a row, each into the upper half of SHORTS."""
    stored = load(b, ir.VectorType(I8, LANES), address)
    return b.shl(b.zext(stored, SHORTS), every(SHORTS, 8))


def _e4m3(b: Any, shifted: Any) -> Any:
    """Decodes e4m3 in the upper byte of SHORTS to float16 with the exponent 8 too small, subnormals too.

    NaN (all bits set, except the sign) becomes NaN.
    """
    half = b.and_(b.ashr(shifted, every(SHORTS, 1)), every(SHORTS, 0xBF80 - (1 << 16)))
    is_nan = b.icmp_unsigned("==", b.and_(half, _HALF), every(SHORTS, 0x3F80))
    half = b.select(is_nan, every(SHORTS, 0x7E00), half)
    return b.fpext(b.bitcast(half, HALVES), FLOATS)


E4M3 = wide(
    8,
    lambda b, x: [_e4m3(b, y) for y in unpack_bytes(b, x)],
    lambda b, address: _e4m3(b, load_bytes(b, address)),
    marks_nan=True,
)
E4M3_FACTOR = 2.0**8
"""Factor on decoded numbers of `E4M3`, whose exponent is read as a float16's."""


def block_scales(b: Any, address: Any, vectors: int) -> Any:
    """Loads scales of a chunk's one or two blocks of 16, in the order of 4-bit lanes of `Codes.chunk`."""
    first = splat(b, load(b, F32, address, 4))
    if vectors == 1:
        return first
    second = splat(b, load(b, F32, b.add(address, i64(4)), 4))
    return shuffle(b, first, second, [0] * 8 + [LANES] * 8)


def nan_rows(b: Any, x: Any) -> Any:
    """Returns WORDS, one lane per row, not 0 where the row of e4m3 codes has NaN."""
    kind = ir.VectorType(I8, 4 * LANES)
    signs = b.or_(b.bitcast(x, kind), every(kind, -128))
    hit = b.icmp_unsigned("==", signs, every(kind, -1))
    return b.bitcast(b.sext(hit, kind), WORDS)
