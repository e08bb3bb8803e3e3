"""How each encoding becomes float32 lanes: the one place where a stored code is decoded here.

Two shapes, one meaning. `unpack` takes words of 16 rows, one row a lane (keys: a dimension of 16
keys at a time, so that dot products need no sum over lanes). `row_chunk` takes 32 neighbouring
numbers of one row (values). Scales are not applied here, but for block scales, which change inside a
row: those of whole rows multiply scores and weights instead.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kvant.attention.cpu.layout import Code
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
from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT
from kvant.kv.codecs.e2m1 import MAGNITUDES

BITS = {
    Code.FLOAT32: 32, Code.FLOAT16: 16, Code.BFLOAT16: 16, Code.E4M3: 8, Code.E5M2: 8, Code.INT8: 8,
    Code.UINT4: 4, Code.E2M1: 4, Code.CODEBOOK4: 4, Code.UINT3: 3, Code.CODEBOOK3: 3,
}  # fmt: skip
_TABLES = {
    Code.E2M1: (*MAGNITUDES, *(-x for x in MAGNITUDES)),
    Code.CODEBOOK4: CENTROIDS_4BIT,
    Code.CODEBOOK3: CENTROIDS_3BIT,
}
_HALF = every(SHORTS, 0x7FFF)


def group_words(code: Code) -> int:
    """Words that are unpacked together: 3-bit codes end with a word only every third one."""
    return 3 if BITS[code] == 3 else 1


def _as_number(context: Any, b: Any, code: Code, index: Any) -> Any:
    """Small integers in WORDS to the numbers that these codes mean."""
    if code in _TABLES:
        return look_up(context, b, _TABLES[code], index)
    return b.sitofp(index, FLOATS)


def _e4m3(b: Any, shifted: Any) -> Any:
    """e4m3 in the upper byte of SHORTS: float16 with the exponent 8 too small; subnormals too.

    NaN (all bits but the sign) becomes NaN.
    """
    half = b.and_(b.ashr(shifted, every(SHORTS, 1)), every(SHORTS, 0xBF80 - (1 << 16)))
    is_nan = b.icmp_unsigned("==", b.and_(half, _HALF), every(SHORTS, 0x3F80))
    half = b.select(is_nan, every(SHORTS, 0x7E00), half)
    return b.fpext(b.bitcast(half, HALVES), FLOATS)


def unpack(context: Any, b: Any, code: Code, group: list[Any]) -> list[Any]:
    """`group_words` WORDS, lanes rows, to the FLOATS of the numbers in them, in order."""
    x = group[0]
    bits = BITS[code]
    if code is Code.FLOAT32:
        return [b.bitcast(x, FLOATS)]
    if code is Code.BFLOAT16:
        parts = (b.shl(x, words(16)), b.and_(x, words(0xFFFF0000)))
        return [b.bitcast(part, FLOATS) for part in parts]
    if code is Code.FLOAT16:
        halves = (b.trunc(x, SHORTS), b.trunc(b.lshr(x, words(16)), SHORTS))
        return [b.fpext(b.bitcast(half, HALVES), FLOATS) for half in halves]
    if code is Code.INT8:
        tops = [b.shl(x, words(24 - 8 * j)) for j in range(3)] + [x]
        return [b.sitofp(b.ashr(top, words(24)), FLOATS) for top in tops]
    if bits == 8:
        low, high = b.trunc(x, SHORTS), b.trunc(b.lshr(x, words(16)), SHORTS)
        top = every(SHORTS, 8)
        bytes_ = [b.shl(low, top), low, b.shl(high, top), high]
        upper = every(SHORTS, 0xFF00 - (1 << 16))
        bytes_ = [b.and_(y, upper) for y in bytes_]
        if code is Code.E4M3:
            return [_e4m3(b, y) for y in bytes_]
        return [b.fpext(b.bitcast(y, HALVES), FLOATS) for y in bytes_]
    found = []
    for position in range(0, 32 * len(group), bits):
        word, shift = divmod(position, 32)
        index = b.lshr(group[word], words(shift)) if shift else group[word]
        if shift + bits > 32:
            index = b.or_(index, b.shl(group[word + 1], words(32 - shift)))
        found.append(_as_number(context, b, code, b.and_(index, words((1 << bits) - 1))))
    return found


def row_chunk(context: Any, b: Any, code: Code, address: Any, vectors: int) -> list[Any]:
    """Numbers of one row from `address` on, as 1 or 2 FLOATS (16 or 32 numbers).

    4-bit codes come with the chunk's even numbers before its odd ones.
    """
    bits = BITS[code]
    if bits >= 8:
        return [
            _row_vector(b, code, b.add(address, i64(v * LANES * bits // 8))) for v in range(vectors)
        ]
    if bits == 4:
        n = 8 * vectors
        pairs = b.zext(load(b, ir.VectorType(I8, n), address), ir.VectorType(I32, n))
        low = b.and_(pairs, every(pairs.type, 15))
        high = b.lshr(pairs, every(pairs.type, 4))
        if vectors == 2:
            return [_as_number(context, b, code, index) for index in (low, high)]
        return [_as_number(context, b, code, shuffle(b, low, high, list(range(16))))]
    # 3 bits: 16 numbers lie in 6 bytes, 32 in 12.
    if vectors == 2:
        packed = load(b, ir.VectorType(I32, 3), address)
    else:
        low_word = load(b, I32, address)
        high_word = b.zext(load(b, I16, b.add(address, i64(4))), I32)
        packed = ir.Constant(ir.VectorType(I32, 3), [0, 0, 0])
        packed = b.insert_element(packed, low_word, ir.Constant(I32, 0))
        packed = b.insert_element(packed, high_word, ir.Constant(I32, 1))
    found = []
    for v in range(vectors):
        starts = [3 * (LANES * v + lane) for lane in range(LANES)]
        first = shuffle(b, packed, packed, [start >> 5 for start in starts])
        last = shuffle(b, packed, packed, [(start + 2) >> 5 for start in starts])
        amounts = ir.Constant(WORDS, [start & 31 for start in starts])
        index = call(b, "llvm.fshr.v16i32", WORDS, last, first, amounts)
        found.append(_as_number(context, b, code, b.and_(index, words(7))))
    return found


def _row_vector(b: Any, code: Code, address: Any) -> Any:
    """16 neighbouring numbers of a row, encodings of 8 bits and more."""
    if code is Code.FLOAT32:
        return load(b, FLOATS, address)
    if code is Code.FLOAT16:
        return b.fpext(load(b, HALVES, address), FLOATS)
    if code is Code.BFLOAT16:
        wide = b.zext(load(b, SHORTS, address), WORDS)
        return b.bitcast(b.shl(wide, words(16)), FLOATS)
    stored = load(b, ir.VectorType(I8, LANES), address)
    if code is Code.INT8:
        return b.sitofp(b.sext(stored, WORDS), FLOATS)
    shifted = b.shl(b.zext(stored, SHORTS), every(SHORTS, 8))
    if code is Code.E4M3:
        return _e4m3(b, shifted)
    return b.fpext(b.bitcast(shifted, HALVES), FLOATS)


def block_scales(b: Any, address: Any, vectors: int) -> Any:
    """Scales of a chunk's one or two blocks of 16, in the order of `row_chunk`'s 4-bit lanes."""
    first = splat(b, load(b, F32, address, 4))
    if vectors == 1:
        return first
    second = splat(b, load(b, F32, b.add(address, i64(4)), 4))
    return shuffle(b, first, second, [0] * 8 + [LANES] * 8)


def nan_rows(b: Any, x: Any) -> Any:
    """WORDS of e4m3 codes, lanes rows: not 0 where a row has NaN."""
    kind = ir.VectorType(I8, 4 * LANES)
    signs = b.or_(b.bitcast(x, kind), every(kind, -128))
    hit = b.icmp_unsigned("==", signs, every(kind, -1))
    return b.bitcast(b.sext(hit, kind), WORDS)
