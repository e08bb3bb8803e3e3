"""Matrix products with float32 weights: every thread takes rows of the weight, 16 columns per vector.

An output is the sum over its row's vectors in their order, one fused multiply-add each, and then over
16 lanes in a fixed tree. That order does not depend on the number of rows of x, on a row's position or
on threads. So products are batch-invariant.
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
    F32,
    FLOATS,
    LANES,
    every,
    fetch_add,
    fma,
    i64,
    load,
    load_i64,
    prefetch,
    repeat,
    shuffle,
    store,
)
from kvant.models.cpu.layout import Product

_HAS_AVX512 = bool(llvm.get_host_cpu_features().get("avx512f"))
OUTPUTS, ROWS = (4, 6) if _HAS_AVX512 else (2, 3)
"""Rows of the weight and of x whose sums are in registers at once: 24 of 32, with AVX2 12 of 16."""
_FETCHED_AHEAD = 4096  # bytes of each weight row's own stream
_LINE = 64
_ZERO = every(FLOATS, 0.0)


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
    typing: Any, rows: Any, weight: Any, stride: Any, bias: Any, x: Any, x_stride: Any, pairs: Any,
    out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """OUTPUTS rows of the weight times `rows` rows of x, over `pairs` of vectors, plus bias."""
    n = rows.literal_value
    signature = types.void(rows, *[types.int64] * 8)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, weight, stride, bias, x, x_stride, pairs, out, out_stride = arguments
        at = [b.add(weight, b.mul(stride, i64(i))) for i in range(OUTPUTS)]
        x_at = [b.add(x, b.mul(x_stride, i64(r))) for r in range(n)]

        def add(pair: Any, sums: list[Any]) -> list[Any]:
            new = list(sums)
            step = b.mul(pair, i64(8 * LANES))
            numbers = [
                [load(b, FLOATS, b.add(b.add(row, step), i64(64 * i)), 4) for i in range(2)]
                for row in x_at
            ]
            for i in range(OUTPUTS):
                place = b.add(at[i], step)
                for line in range(0, 8 * LANES, _LINE):
                    prefetch(b, b.add(place, i64(_FETCHED_AHEAD + line)))
                for j in range(2):
                    w = load(b, FLOATS, b.add(place, i64(64 * j)), 4)
                    for r in range(n):
                        new[i * n + r] = fma(b, w, numbers[r][j], new[i * n + r])
            return new

        new = repeat(b, pairs, [_ZERO] * (OUTPUTS * n), add)
        biases = load(b, ir.VectorType(F32, OUTPUTS), bias, 4)
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
                place = b.add(out, b.mul(out_stride, i64(row + r)))
                store(b, b.fadd(value, biases), place, 4)
            row += together
        return context.get_dummy_value()

    return signature, generate


@cache
def product_worker() -> int:
    """Address of void(task, _): what every thread runs."""
    most, at_once = ROWS, OUTPUTS

    def work(task: int, _: int) -> None:
        weight, stride = load_i64(task + Product.WEIGHT), load_i64(task + Product.STRIDE)
        outputs, columns = load_i64(task + Product.OUTPUTS), load_i64(task + Product.COLUMNS)
        x, x_stride = load_i64(task + Product.X), load_i64(task + Product.X_STRIDE)
        out, out_stride = load_i64(task + Product.OUT), load_i64(task + Product.OUT_STRIDE)
        rows, chunk, bias = (
            load_i64(task + Product.ROWS),
            load_i64(task + Product.CHUNK),
            load_i64(task + Product.BIAS),
        )
        pairs = columns // 32
        tiles = (rows + most - 1) // most
        while True:
            first = fetch_add(task + Product.NEXT, chunk)
            if first >= outputs:
                return
            end = min(outputs, first + chunk)
            first = min(first, outputs - at_once)  # the last ones again, with the same result
            for tile in range(tiles):
                start = rows * tile // tiles
                n = rows * (tile + 1) // tiles - start
                a = x + start * x_stride
                output = first
                while output < end:
                    at = min(output, end - at_once)
                    c = out + start * out_stride + 4 * at
                    w, d = weight + at * stride, bias + 4 * at
                    if n == 1:
                        _multiply(1, w, stride, d, a, x_stride, pairs, c, out_stride)
                    elif n == 2:
                        _multiply(2, w, stride, d, a, x_stride, pairs, c, out_stride)
                    elif n == 3:
                        _multiply(3, w, stride, d, a, x_stride, pairs, c, out_stride)
                    elif n == 4:
                        _multiply(4, w, stride, d, a, x_stride, pairs, c, out_stride)
                    elif n == 5:
                        _multiply(5, w, stride, d, a, x_stride, pairs, c, out_stride)
                    else:
                        _multiply(6, w, stride, d, a, x_stride, pairs, c, out_stride)
                    output += at_once

    return compiled_worker(work)
