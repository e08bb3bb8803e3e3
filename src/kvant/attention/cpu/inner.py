"""The innermost loops: 64 keys or values of one KV head against a few rows of queries.

    key_words     16 rows of codes -> words of scratch, lanes are keys      (any encoding)
    score_keys    q . k for up to 6 rows, unpacking those words             (few rows)
    expand_keys   the same words -> float32 [head_dim][64]                  (many rows: then `multiply`)
    weigh_values  acc += p v for up to 6 rows, decoding rows of codes       (few rows)
    expand_values rows of codes -> float32 [64][head_dim]                   (many rows: then `multiply`)
    multiply      c (+)= a b in float32

Both ways sum a score over a row's numbers in order, and an output over keys in order, with one fused
multiply-add per term. So few rows and many rows give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvant.attention.cpu.codes import block_scales, nan_rows
from kvant.attention.cpu.format import Codes, codes_of
from kvant.kernels.cpu.vector import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    WORDS,
    call,
    every,
    exp_lanes,
    fma,
    i64,
    load,
    load_first,
    prefetch,
    splat,
    store,
    transpose,
)  # fmt: skip

TILE = 64
"""Keys per tile; 4 vectors of lanes."""
_VECTORS = TILE // LANES
_AHEAD = TILE
_LINE = 64
_PITCH = 4 * TILE  # bytes of one row of [..][TILE] floats or words
_ZERO = every(FLOATS, 0.0)
_FEW = (6, 4, 3, 2, 1)
"""Numbers of query rows that share one unpacking of codes."""


def _literal(given: Any) -> int:
    value: int = given.literal_value
    return value


def _accumulators(b: Any, rows: int, vectors: int) -> list[list[Any]]:
    """Allocates accumulators that LLVM keeps in registers, because the code only loads and stores them."""
    return [[cgutils.alloca_once(b, FLOATS) for _ in range(vectors)] for _ in range(rows)]


def _row(b: Any, base: Any, pitch: Any, row: Any) -> Any:
    return b.add(base, b.mul(pitch, i64(row) if isinstance(row, int) else row))


def _in_blocks(b: Any, rows: Any, sizes: tuple[int, ...], body: Callable[[int, Any], None]) -> None:
    """Emits body(size, first row) for blocks of rows, the largest first; the last size is 1."""
    first = i64(0)
    for size in sizes:
        count = b.sdiv(b.sub(rows, first), i64(size))
        with cgutils.for_range(b, count) as loop:
            body(size, b.add(first, b.mul(loop.index, i64(size))))
        first = b.add(first, b.mul(count, i64(size)))


@intrinsic(prefer_literal=True)
def key_words(
    typing: Any, width: Any, code: Any, base: Any, slots: Any, offset: Any, count: Any, out: Any,
    nans: Any,
) -> Any:  # fmt: skip
    """Transposes words offset / 4 .. of 16 rows: width (4, 8, 16) words, or `count` words if width is 4.

    slots: address of int64; row i begins at base + slots[i]. out: words [..][TILE]. nans: WORDS, set to
    a value other than 0 where an e4m3 row has NaN. Prefetches the rows 64 further on.
    """
    n, kind = _literal(width), codes_of(_literal(code))
    signature = types.void(width, code, *[types.int64] * 6)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, base, slots, offset, count, out, nans = arguments
        base = b.add(base, offset)
        rows = []
        for lane in range(LANES):
            place = b.add(slots, i64(8 * lane))
            address = b.add(base, load(b, I64, place, 8))
            later = load(b, I64, b.add(place, i64(8 * _AHEAD)), 8)
            prefetch(b, b.add(base, later))
            type_ = ir.VectorType(I32, n)
            rows.append(load_first(b, type_, address, count) if n == 4 else load(b, type_, address))
        found = transpose(b, rows, n)
        if kind.marks_nan:
            seen = load(b, WORDS, nans, 4)
            for x in found:
                seen = b.or_(seen, nan_rows(b, x))
            store(b, seen, nans, 4)
        for i, x in enumerate(found):
            store(b, x, b.add(out, i64(_PITCH * i)), 4)
        return context.get_dummy_value()

    return signature, generate


def _unpacked(
    context: Any, b: Any, code: Codes, words_: Any, group: Any, scales: Any
) -> list[list[Any]]:
    """Decodes one group of words for each of the tile's vectors, with block scales."""
    size = code.group
    start = b.add(words_, b.mul(group, i64(_PITCH * size)))
    found = []
    for v in range(_VECTORS):
        addresses = [b.add(start, i64(_PITCH * w + 4 * LANES * v)) for w in range(size)]
        numbers = code.unpack(context, b, [load(b, WORDS, a, 4) for a in addresses])
        if code.in_blocks:
            block = b.lshr(group, i64(1))  # 8 numbers a word, 16 a block
            place = b.add(b.add(scales, b.mul(block, i64(_PITCH))), i64(4 * LANES * v))
            scale = load(b, FLOATS, place, 4)
            numbers = [b.fmul(number, scale) for number in numbers]
        found.append(numbers)
    return found


@intrinsic(prefer_literal=True)
def score_keys(
    typing: Any, code: Any, rows: Any, q: Any, pitch: Any, words_: Any, groups: Any, scales: Any,
    out: Any,
) -> Any:  # fmt: skip
    """Writes out[r][TILE] = q[r] . keys, for `rows` rows. pitch: bytes between rows of q."""
    kind = codes_of(_literal(code))
    signature = types.void(code, *[types.int64] * 7)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, rows, q, pitch, words_, groups, scales, out = arguments
        per_group = 32 * kind.group // kind.bits

        def block(n: int, first: Any) -> None:
            sums = _accumulators(b, n, _VECTORS)
            for row in sums:
                for place in row:
                    b.store(_ZERO, place)
            q_rows = [_row(b, _row(b, q, pitch, first), pitch, r) for r in range(n)]
            with cgutils.for_range(b, groups) as loop:
                numbers = _unpacked(context, b, kind, words_, loop.index, scales)
                start = b.mul(loop.index, i64(4 * per_group))
                for e in range(per_group):
                    for r in range(n):
                        here = b.add(b.add(q_rows[r], start), i64(4 * e))
                        factor = splat(b, load(b, F32, here, 4))
                        for v, place in enumerate(sums[r]):
                            b.store(fma(b, factor, numbers[v][e], b.load(place)), place)
            to = _row(b, out, i64(_PITCH), first)
            for r in range(n):
                for v, place in enumerate(sums[r]):
                    store(b, b.load(place), b.add(to, i64(_PITCH * r + 4 * LANES * v)), 4)

        _in_blocks(b, rows, _FEW, block)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def expand_keys(typing: Any, code: Any, words_: Any, groups: Any, scales: Any, out: Any) -> Any:
    """Decodes the tile's keys to float32: out [head_dim][TILE]."""
    kind = codes_of(_literal(code))
    signature = types.void(code, *[types.int64] * 4)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, words_, groups, scales, out = arguments
        per_group = 32 * kind.group // kind.bits
        with cgutils.for_range(b, groups) as loop:
            start = b.add(out, b.mul(loop.index, i64(_PITCH * per_group)))
            for v, numbers in enumerate(_unpacked(context, b, kind, words_, loop.index, scales)):
                for e, number in enumerate(numbers):
                    store(b, number, b.add(start, i64(_PITCH * e + 4 * LANES * v)), 4)
        return context.get_dummy_value()

    return signature, generate


def _values(
    context: Any, b: Any, code: Codes, address: Any, vectors: int, scales: Any
) -> list[Any]:
    """Decodes `vectors` FLOATS of one row of values; scales: address of the block scales from here on."""
    at_once = min(vectors, 2)
    found: list[Any] = []
    for start in range(0, vectors, at_once):
        here = b.add(address, i64(start * LANES * code.bits // 8))
        numbers = code.chunk(context, b, here, at_once)
        if code.in_blocks:
            scale = block_scales(b, b.add(scales, i64(4 * start)), at_once)
            numbers = [b.fmul(number, scale) for number in numbers]
        found += numbers
    return found


@intrinsic(prefer_literal=True)
def weigh_values(
    typing: Any, code: Any, vectors: Any, rows: Any, weights: Any, base: Any, slots: Any,
    scales: Any, scales_pitch: Any, out: Any, pitch: Any,
) -> Any:  # fmt: skip
    """Adds weights[r][TILE] . values to out[r][16 * vectors]. pitch: bytes between rows of out."""
    kind, m = codes_of(_literal(code)), _literal(vectors)
    signature = types.void(code, vectors, *[types.int64] * 8)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, rows, weights, base, slots, scales, scales_pitch, out, pitch = arguments

        def block(n: int, first: Any) -> None:
            sums = _accumulators(b, n, m)
            out_rows = [_row(b, _row(b, out, pitch, first), pitch, r) for r in range(n)]
            weight_rows = _row(b, weights, i64(_PITCH), first)
            for r in range(n):
                for v, place in enumerate(sums[r]):
                    b.store(load(b, FLOATS, b.add(out_rows[r], i64(4 * LANES * v)), 4), place)
            with cgutils.for_range(b, i64(TILE)) as loop:
                place = b.add(slots, b.mul(loop.index, i64(8)))
                address = b.add(base, load(b, I64, place, 8))
                later = load(b, I64, b.add(place, i64(8 * _AHEAD)), 8)
                later = b.add(base, later)
                for line in range(0, m * LANES * kind.bits // 8, _LINE):
                    prefetch(b, b.add(later, i64(line)))
                here = b.add(scales, b.mul(loop.index, scales_pitch))
                numbers = _values(context, b, kind, address, m, here)
                for r in range(n):
                    at = b.add(b.add(weight_rows, i64(_PITCH * r)), b.mul(loop.index, i64(4)))
                    factor = splat(b, load(b, F32, at, 4))
                    for number, total in zip(numbers, sums[r], strict=True):
                        b.store(fma(b, factor, number, b.load(total)), total)
            for r in range(n):
                for v, total in enumerate(sums[r]):
                    store(b, b.load(total), b.add(out_rows[r], i64(4 * LANES * v)), 4)

        _in_blocks(b, rows, _FEW if m == _VECTORS else (3, 1), block)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def expand_values(
    typing: Any, code: Any, vectors: Any, base: Any, slots: Any, scales: Any,
    scales_pitch: Any, out: Any, pitch: Any,
) -> Any:  # fmt: skip
    """Decodes part of the tile's values to float32: out[t][16 * vectors]."""
    kind, m = codes_of(_literal(code)), _literal(vectors)
    signature = types.void(code, vectors, *[types.int64] * 6)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, base, slots, scales, scales_pitch, out, pitch = arguments
        with cgutils.for_range(b, i64(TILE)) as loop:
            slot = load(b, I64, b.add(slots, b.mul(loop.index, i64(8))), 8)
            here = b.add(scales, b.mul(loop.index, scales_pitch))
            address = b.add(base, slot)
            to = b.add(out, b.mul(loop.index, pitch))
            for v, number in enumerate(_values(context, b, kind, address, m, here)):
                store(b, number, b.add(to, i64(4 * LANES * v)), 4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def multiply(
    typing: Any, vectors: Any, adds: Any, rows: Any, a: Any, a_pitch: Any, b_: Any, b_pitch: Any,
    c: Any, c_pitch: Any, depth: Any,
) -> Any:  # fmt: skip
    """Writes c[r][16 * vectors] = a[r][depth] b[depth][..], or adds it to c if `adds`. Pitches in bytes."""
    m, is_sum = _literal(vectors), bool(_literal(adds))
    signature = types.void(vectors, adds, *[types.int64] * 8)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, rows, a, a_pitch, right, right_pitch, c, c_pitch, depth = arguments

        def block(n: int, first: Any) -> None:
            sums = _accumulators(b, n, m)
            c_rows = [_row(b, _row(b, c, c_pitch, first), c_pitch, r) for r in range(n)]
            for r in range(n):
                for v, place in enumerate(sums[r]):
                    at = b.add(c_rows[r], i64(4 * LANES * v))
                    b.store(load(b, FLOATS, at, 4) if is_sum else _ZERO, place)
            a_rows = [_row(b, _row(b, a, a_pitch, first), a_pitch, r) for r in range(n)]
            with cgutils.for_range(b, depth) as loop:
                start = b.add(right, b.mul(loop.index, right_pitch))
                numbers = [load(b, FLOATS, b.add(start, i64(4 * LANES * v)), 4) for v in range(m)]
                for r in range(n):
                    factor = splat(b, load(b, F32, b.add(a_rows[r], b.mul(loop.index, i64(4))), 4))
                    for number, place in zip(numbers, sums[r], strict=True):
                        b.store(fma(b, factor, number, b.load(place)), place)
            for r in range(n):
                for v, place in enumerate(sums[r]):
                    store(b, b.load(place), b.add(c_rows[r], i64(4 * LANES * v)), 4)

        _in_blocks(b, rows, (6, 1) if is_sum else (6, 3, 1), block)
        return context.get_dummy_value()

    return signature, generate


# -- softmax -----------------------------------------------------------------------------------


def _const(value: float) -> Any:
    return every(FLOATS, value)


def _tanh(b: Any, x: Any) -> Any:
    size = call(b, "llvm.fabs.v16f32", FLOATS, x)
    t = exp_lanes(b, b.fmul(size, _const(-2.0)))
    y = b.fdiv(b.fsub(_const(1.0), t), b.fadd(_const(1.0), t))
    return call(b, "llvm.copysign.v16f32", FLOATS, y, x)


def _reduce(b: Any, kind: str, first: float, x: Any) -> Any:
    """Reduces over the lanes in a fixed tree."""
    width = LANES // 2
    while width:
        half = b.shuffle_vector(
            x, x, ir.Constant(WORDS, [(i + width) % LANES for i in range(LANES)])
        )
        x = b.fadd(x, half) if kind == "add" else call(b, "llvm.maxnum.v16f32", FLOATS, x, half)
        width //= 2
    return b.extract_element(x, ir.Constant(I32, 0))


@intrinsic
def mask_scores(
    typing: Any, scores: Any, scale: Any, offset: Any, q_sum: Any, cap: Any, first: Any, end: Any
) -> Any:
    """Writes scores[TILE] = scale * scores + offset * q_sum, capped; returns the largest.

    Scores outside [first, end) become -inf. scale, offset: addresses of [TILE]. cap: 0 for none.
    """
    signature = types.float32(
        types.int64,
        types.int64,
        types.int64,
        types.float32,
        types.float32,
        types.int64,
        types.int64,
    )

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        scores, scale, offset, q_sum, cap, first, end = arguments
        first = splat(b, b.trunc(first, I32))
        end = splat(b, b.trunc(end, I32))
        q_sum = splat(b, q_sum)
        is_capped = b.fcmp_ordered(">", cap, ir.Constant(F32, 0.0))
        cap_lanes = splat(b, cap)
        largest = cgutils.alloca_once(b, FLOATS)
        b.store(_const(float("-inf")), largest)
        with cgutils.for_range(b, i64(_VECTORS)) as loop:
            step = b.mul(loop.index, i64(4 * LANES))
            place = b.add(scores, step)
            x = b.fmul(load(b, FLOATS, place, 4), load(b, FLOATS, b.add(scale, step), 4))
            x = fma(b, load(b, FLOATS, b.add(offset, step), 4), q_sum, x)
            found = cgutils.alloca_once(b, FLOATS)
            b.store(x, found)
            with b.if_then(is_capped):
                b.store(b.fmul(_tanh(b, b.fdiv(x, cap_lanes)), cap_lanes), found)
            lanes = ir.Constant(WORDS, list(range(LANES)))
            key = b.add(lanes, splat(b, b.trunc(b.mul(loop.index, i64(LANES)), I32)))
            is_seen = b.and_(b.icmp_signed(">=", key, first), b.icmp_signed("<", key, end))
            x = b.select(is_seen, b.load(found), _const(float("-inf")))
            store(b, x, place, 4)
            b.store(call(b, "llvm.maxnum.v16f32", FLOATS, b.load(largest), x), largest)
        return _reduce(b, "max", 0.0, b.load(largest))

    return signature, generate


@intrinsic
def weights_of(typing: Any, scores: Any, largest: Any, scale: Any, offset: Any, sums: Any) -> Any:
    """Writes scores[TILE] = p * scale with p = e^(scores - largest); sums += (sum p, sum p * offset)."""
    signature = types.void(types.int64, types.float32, types.int64, types.int64, types.int64)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        scores, largest, scale, offset, sums = arguments
        largest = splat(b, largest)
        total, shifted = (cgutils.alloca_once(b, FLOATS) for _ in range(2))
        b.store(_ZERO, total)
        b.store(_ZERO, shifted)
        with cgutils.for_range(b, i64(_VECTORS)) as loop:
            step = b.mul(loop.index, i64(4 * LANES))
            place = b.add(scores, step)
            p = exp_lanes(b, b.fsub(load(b, FLOATS, place, 4), largest))
            b.store(b.fadd(b.load(total), p), total)
            away = load(b, FLOATS, b.add(offset, step), 4)
            b.store(fma(b, p, away, b.load(shifted)), shifted)
            store(b, b.fmul(p, load(b, FLOATS, b.add(scale, step), 4)), place, 4)
        for i, place in enumerate((total, shifted)):
            at = b.add(sums, i64(4 * i))
            store(b, b.fadd(load(b, F32, at, 4), _reduce(b, "add", 0.0, b.load(place))), at, 4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exp_of(typing: Any, x: Any) -> Any:
    """Returns e^x of one number x <= 0, with the same bits as in a lane."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return b.extract_element(exp_lanes(b, splat(b, arguments[0])), ir.Constant(I32, 0))

    return types.float32(types.float32), generate


@intrinsic
def blend_rows(typing: Any, into: Any, kept: Any, other: Any, factor: Any, count: Any) -> Any:
    """Writes into[count] = into * kept + other * factor; count is a multiple of 16."""
    signature = types.void(types.int64, types.float32, types.int64, types.float32, types.int64)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        into, kept, other, factor, count = arguments
        kept, factor = splat(b, kept), splat(b, factor)
        with cgutils.for_range(b, b.lshr(count, i64(4))) as loop:
            step = b.mul(loop.index, i64(4 * LANES))
            place = b.add(into, step)
            x = b.fmul(load(b, FLOATS, place, 4), kept)
            store(b, fma(b, load(b, FLOATS, b.add(other, step), 4), factor, x), place, 4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def scale_row(typing: Any, x: Any, factor: Any, count: Any) -> Any:
    """Multiplies x[count] by factor; count is a multiple of 16."""
    signature = types.void(types.int64, types.float32, types.int64)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, factor, count = arguments
        factor = splat(b, factor)
        with cgutils.for_range(b, b.lshr(count, i64(4))) as loop:
            place = b.add(x, b.mul(loop.index, i64(4 * LANES)))
            store(b, b.fmul(load(b, FLOATS, place, 4), factor), place, 4)
        return context.get_dummy_value()

    return signature, generate
