"""Matrix products with stored weights: every thread takes rows of the weight, 16 columns per vector.

An output is the sum over its row's vectors in their order, one fused multiply-add each, and then over
16 lanes in a fixed tree. That order does not depend on the number of rows of x, on a row's position or
on threads. So products are batch-invariant.

Few rows of x multiply codes as they are read. For more, a thread decodes some rows of the weight into
its own memory (level 2 cache) and multiplies those.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvant.kernels.cpu.compiled import compiled_worker
from kvant.kernels.cpu.vector import (
    BYTES,
    F16,
    F32,
    FLOATS,
    I32,
    LANES,
    WORDS,
    every,
    fetch_add,
    fma,
    i64,
    load,
    load_i64,
    look_up,
    prefetch,
    repeat,
    shuffle,
    store,
    words,
)
from kvant.models.cpu.layout import Product
from kvant.models.cpu.weights import Code

_HAS_AVX512 = bool(llvm.get_host_cpu_features().get("avx512f"))
OUTPUTS, ROWS = (4, 6) if _HAS_AVX512 else (2, 3)
"""Rows of the weight and of x whose sums are in registers at once: 24 of 32, with AVX2 12 of 16."""
_FETCHED_AHEAD = 4096  # bytes of each weight row's own stream
_DIGITS = tuple(float(i) for i in range(16))
_LINE = 64
_ZERO = every(FLOATS, 0.0)
_BITS = {Code.FLOAT32: 32, Code.INT8: 8, Code.INT4: 4}

P_NEXT, P_TICKET, P_WEIGHT, P_STRIDE, P_SCALES, P_SCALES_STRIDE, P_BIAS = (
    int(f) for f in (
        Product.NEXT, Product.TICKET, Product.WEIGHT, Product.STRIDE, Product.SCALES,
        Product.SCALES_STRIDE, Product.BIAS,
    )
)  # fmt: skip
P_OUTPUTS, P_COLUMNS, P_CHUNK, P_X, P_X_STRIDE, P_OUT, P_OUT_STRIDE, P_ROWS = (
    int(f) for f in (
        Product.OUTPUTS, Product.COLUMNS, Product.CHUNK, Product.X, Product.X_STRIDE, Product.OUT,
        Product.OUT_STRIDE, Product.ROWS,
    )
)  # fmt: skip
P_SCRATCH, P_SCRATCH_STRIDE = int(Product.SCRATCH), int(Product.SCRATCH_STRIDE)


def _decoded(context: Any, b: Any, code: Code, at: Any, scales: Any, pair: Any) -> tuple[Any, Any]:
    """The `pair`-th 32 numbers of a row that begins at `at`, int8 without its scale."""
    place = b.add(at, b.mul(pair, i64(4 * _BITS[code])))
    if code is Code.FLOAT32:
        return load(b, FLOATS, place, 4), load(b, FLOATS, b.add(place, i64(64)), 4)
    if code is Code.INT8:
        first, second = (load(b, BYTES, b.add(place, i64(16 * i))) for i in range(2))
        return tuple(b.sitofp(b.sext(x, WORDS), FLOATS) for x in (first, second))
    both = b.zext(load(b, BYTES, place), WORDS)
    halves = load(b, ir.VectorType(F16, 2), b.add(scales, b.mul(pair, i64(4))), 4)
    pairs = b.fpext(halves, ir.VectorType(F32, 2))
    scale, offset = (shuffle(b, pairs, pairs, [i] * LANES) for i in range(2))
    found = []
    for code4 in (both, b.lshr(both, words(4))):  # of which the lowest four bits are looked up
        found.append(fma(b, look_up(context, b, _DIGITS, code4), scale, offset))
    return found[0], found[1]


def _pairs(count: int, half: int) -> list[tuple[int, int, list[int], list[int]]]:
    """One level of `_sums`: which two vectors meet, and the lanes of both that are added.

    Lane l of each vector meets l + half, in every group of 2 * half lanes. A last vector meets itself.
    """
    first = [
        (LANES if lane // half % 2 else 0) + lane // half // 2 * 2 * half + lane % half
        for lane in range(LANES)
    ]
    step = max(1, count // 2)
    return [(i, (i + step) % count, first, [lane + half for lane in first]) for i in range(step)]


def _sums(b: Any, vectors: list[Any]) -> Any:
    """A vector with the sums over lanes of 16, 8, 4 .. vectors, where `_places` says.

    Every vector's lanes are added in the same order, however many there are.
    """
    level, half = vectors, LANES // 2
    while half:
        level = [
            b.fadd(shuffle(b, level[i], level[j], low), shuffle(b, level[i], level[j], high))
            for i, j, low, high in _pairs(len(level), half)
        ]
        half //= 2
    return level[0]


def _places(count: int) -> list[int]:
    """The lane in which `_sums` leaves the sum of each of `count` vectors."""
    level, half = [[i] * LANES for i in range(count)], LANES // 2
    while half:
        level = [
            [(level[i] + level[j])[lane] for lane in low]
            for i, j, low, _ in _pairs(len(level), half)
        ]
        half //= 2
    return [level[0].index(i) for i in range(count)]


@intrinsic(prefer_literal=True)
def _multiply(
    typing: Any, code: Any, scaled: Any, rows: Any, weight: Any, stride: Any, scales: Any,
    scales_stride: Any, bias: Any, x: Any, x_stride: Any, pairs: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """OUTPUTS rows of the weight times `rows` rows of x, over `pairs` of vectors, plus bias.

    scaled: multiply by the float32 that each row has at `scales` before.
    """
    kind, is_scaled, n = Code(code.literal_value), bool(scaled.literal_value), rows.literal_value
    signature = types.void(code, scaled, rows, *[types.int64] * 10)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        (
            _, _, _, weight, stride, scales, scales_stride, bias, x, x_stride, pairs, out, out_stride,
        ) = arguments  # fmt: skip
        at = [b.add(weight, b.mul(stride, i64(i))) for i in range(OUTPUTS)]
        scale_at = [b.add(scales, b.mul(scales_stride, i64(i))) for i in range(OUTPUTS)]
        x_at = [b.add(x, b.mul(x_stride, i64(r))) for r in range(n)]

        def add(pair: Any, sums: list[Any]) -> list[Any]:
            new = list(sums)
            step = b.mul(pair, i64(8 * LANES))
            numbers = [
                [load(b, FLOATS, b.add(b.add(row, step), i64(64 * i)), 4) for i in range(2)]
                for row in x_at
            ]
            for i in range(OUTPUTS):
                ahead = b.add(b.add(at[i], i64(_FETCHED_AHEAD)), b.mul(pair, i64(4 * _BITS[kind])))
                for line in range(0, 4 * _BITS[kind], _LINE):
                    prefetch(b, b.add(ahead, i64(line)))
                for j, w in enumerate(_decoded(context, b, kind, at[i], scale_at[i], pair)):
                    for r in range(n):
                        new[i * n + r] = fma(b, w, numbers[r][j], new[i * n + r])
            return new

        new = repeat(b, pairs, [_ZERO] * (OUTPUTS * n), add)
        few = ir.VectorType(F32, OUTPUTS)
        biases = load(b, few, bias, 4)
        if is_scaled:
            factors = ir.Constant(few, ir.Undefined)
            for i in range(OUTPUTS):
                factors = b.insert_element(
                    factors, load(b, F32, scale_at[i], 4), ir.Constant(I32, i)
                )
        row = 0
        while row < n:
            together = LANES // OUTPUTS
            while together > n - row:
                together //= 2
            places = _places(together * OUTPUTS)
            # Sums of a row's outputs are to stand beside each other.
            order = sorted(range(together * OUTPUTS), key=places.__getitem__)
            put: list[Any] = [None] * (together * OUTPUTS)
            for lane, position in enumerate(order):
                r, i = divmod(lane, OUTPUTS)
                put[position] = new[i * n + row + r]
            found = _sums(b, put)
            lanes = sorted(places)
            for r in range(together):
                own = lanes[r * OUTPUTS : (r + 1) * OUTPUTS]
                value = shuffle(b, found, found, own)
                if is_scaled:
                    value = b.fmul(value, factors)
                place = b.add(out, b.mul(out_stride, i64(row + r)))
                store(b, b.fadd(value, biases), place, 4)
            row += together
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def _decode(typing: Any, code: Any, weight: Any, scales: Any, pair: Any, out: Any) -> Any:
    """The `pair`-th 32 numbers of a row as float32."""
    kind = Code(code.literal_value)
    signature = types.void(code, *[types.int64] * 4)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, weight, scales, pair, out = arguments
        place = b.add(out, b.mul(pair, i64(8 * LANES)))
        for i, numbers in enumerate(_decoded(context, b, kind, weight, scales, pair)):
            store(b, numbers, b.add(place, i64(64 * i)), 4)
        return context.get_dummy_value()

    return signature, generate


@cache
def product_worker(code: Code) -> int:
    """Address of void(task, _): what every thread runs."""
    number, is_plain, is_scaled = int(code), code is Code.FLOAT32, code is Code.INT8
    plain = int(Code.FLOAT32)
    most, at_once = ROWS, OUTPUTS

    def work(task: int, _: int) -> None:
        ticket = fetch_add(task + P_TICKET, 1)
        scratch = load_i64(task + P_SCRATCH) + ticket * load_i64(task + P_SCRATCH_STRIDE)
        weight, stride = load_i64(task + P_WEIGHT), load_i64(task + P_STRIDE)
        scales, scales_stride = load_i64(task + P_SCALES), load_i64(task + P_SCALES_STRIDE)
        outputs, columns = load_i64(task + P_OUTPUTS), load_i64(task + P_COLUMNS)
        x, x_stride = load_i64(task + P_X), load_i64(task + P_X_STRIDE)
        out, out_stride = load_i64(task + P_OUT), load_i64(task + P_OUT_STRIDE)
        rows, chunk, bias = (
            load_i64(task + P_ROWS),
            load_i64(task + P_CHUNK),
            load_i64(task + P_BIAS),
        )
        pairs = columns // 32
        tiles = (rows + most - 1) // most
        is_direct = is_plain or tiles <= 1
        while True:
            first = fetch_add(task + P_NEXT, chunk)
            if first >= outputs:
                return
            end = min(outputs, first + chunk)
            first = min(first, outputs - at_once)  # the last ones again, with the same result
            if not is_direct:
                for row in range(first, end):
                    for pair in range(pairs):
                        _decode(
                            number, weight + row * stride, scales + row * scales_stride, pair,
                            scratch + (row - first) * 4 * columns,
                        )  # fmt: skip
            for tile in range(tiles):
                start = rows * tile // tiles
                n = rows * (tile + 1) // tiles - start
                a = x + start * x_stride
                output = first
                while output < end:
                    at = min(output, end - at_once)
                    c = out + start * out_stride + 4 * at
                    s, d = scales + at * scales_stride, bias + 4 * at
                    if is_direct:
                        w = weight + at * stride
                        if n == 1:
                            _multiply(number, is_scaled, 1, w, stride, s, scales_stride, d, a,
                                      x_stride, pairs, c, out_stride)  # fmt: skip
                        elif n == 2:
                            _multiply(number, is_scaled, 2, w, stride, s, scales_stride, d, a,
                                      x_stride, pairs, c, out_stride)  # fmt: skip
                        elif n == 3:
                            _multiply(number, is_scaled, 3, w, stride, s, scales_stride, d, a,
                                      x_stride, pairs, c, out_stride)  # fmt: skip
                        elif n == 4:
                            _multiply(number, is_scaled, 4, w, stride, s, scales_stride, d, a,
                                      x_stride, pairs, c, out_stride)  # fmt: skip
                        elif n == 5:
                            _multiply(number, is_scaled, 5, w, stride, s, scales_stride, d, a,
                                      x_stride, pairs, c, out_stride)  # fmt: skip
                        else:
                            _multiply(number, is_scaled, 6, w, stride, s, scales_stride, d, a,
                                      x_stride, pairs, c, out_stride)  # fmt: skip
                    else:
                        w = scratch + (at - first) * 4 * columns
                        if n == 2:
                            _multiply(plain, is_scaled, 2, w, 4 * columns, s, scales_stride, d,
                                      a, x_stride, pairs, c, out_stride)  # fmt: skip
                        elif n == 3:
                            _multiply(plain, is_scaled, 3, w, 4 * columns, s, scales_stride, d,
                                      a, x_stride, pairs, c, out_stride)  # fmt: skip
                        elif n == 4:
                            _multiply(plain, is_scaled, 4, w, 4 * columns, s, scales_stride, d,
                                      a, x_stride, pairs, c, out_stride)  # fmt: skip
                        elif n == 5:
                            _multiply(plain, is_scaled, 5, w, 4 * columns, s, scales_stride, d,
                                      a, x_stride, pairs, c, out_stride)  # fmt: skip
                        else:
                            _multiply(plain, is_scaled, 6, w, 4 * columns, s, scales_stride, d,
                                      a, x_stride, pairs, c, out_stride)  # fmt: skip
                    output += at_once

    return compiled_worker(work)
