"""Matrix products with weights of numbers: every thread takes rows of the weight, 16 columns per vector.

Weights are float32, or bfloat16 and widened exactly to float32. An output is the sum over its row's
vectors in order, one fused multiply-add each, and then over 16 lanes in a fixed tree. That order does
not depend on the number of rows of x, on a row's position or on threads. So products are batch-invariant, and
a bfloat16 weight gives the same bits as a float32 weight with these numbers.
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
    I64,
    LANES,
    every,
    fetch_add,
    fma,
    i64,
    is_set,
    load,
    load_bf16_lanes,
    load_i64,
    prefetch,
    repeat,
    shuffle,
    store,
    to_bf16_where,
)
from kvant.models.cpu.layout import Product
from kvant.models.cpu.weights import Code

_HAS_AVX512 = bool(llvm.get_host_cpu_features().get("avx512f"))
OUTPUTS, ROWS = (4, 6) if _HAS_AVX512 else (2, 3)
"""Rows of the weight and of x per tile, whose sums occupy 24 of 32 registers, or 12 of 16 with AVX2."""
_FETCHED_AHEAD = 4096  # bytes, in each row of the weight
_LINE = 64
_ZERO = every(FLOATS, 0.0)


def _pairs(count: int, half: int) -> list[tuple[int, int, list[int], list[int]]]:
    """Returns one level of `_sums`: pairs of vectors, and the lanes of both that are added.

    Lane l of each vector is added to lane l + half, in every group of 2 * half lanes. An odd vector pairs
    with itself.
    """
    first = [
        (LANES if lane // half % 2 else 0) + lane // half // 2 * 2 * half + lane % half
        for lane in range(LANES)
    ]
    step = max(1, count // 2)
    return [(i, (i + step) % count, first, [lane + half for lane in first]) for i in range(step)]


def _sums(b: Any, vectors: list[Any]) -> Any:
    """Returns a vector with the sums over the lanes of 16, 8, 4 .. vectors, at the lanes of `_places`.

    Lanes are added in the same order for any number of vectors.
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
    """Returns the lanes in which `_sums` leaves the sum of each of `count` vectors."""
    level, half = [[i] * LANES for i in range(count)], LANES // 2
    while half:
        level = [
            [(level[i] + level[j])[lane] for lane in low]
            for i, j, low, _ in _pairs(len(level), half)
        ]
        half //= 2
    return [level[0].index(i) for i in range(count)]


def _weights(b: Any, size: int, address: Any) -> Any:
    """Loads sixteen weights of `size` bytes each as FLOATS."""
    return load_bf16_lanes(b, address) if size == 2 else load(b, FLOATS, address, 4)


@intrinsic(prefer_literal=True)
def multiply(
    typing: Any, size: Any, indexed: Any, rows: Any, weight: Any, stride: Any, bias: Any, x: Any,
    x_stride: Any, index: Any, pairs: Any, out: Any, out_stride: Any, rounds: Any,
) -> Any:  # fmt: skip
    """Multiplies OUTPUTS rows of the weight by `rows` (1 .. ROWS) rows of x; adds bias. pairs: of vectors.

    size: bytes of a weight's number. indexed: row r is row index[r] of x, else row r. rounds: if not 0,
    results are rounded to bfloat16.
    """
    width, has_index = size.literal_value, indexed.literal_value
    signature = types.void(size, indexed, *[types.int64] * 11)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        rows, weight, stride, bias, x, x_stride, index, pairs, out, out_stride, rounds = arguments[
            2:
        ]
        done = b.append_basic_block("done")
        cases = [b.append_basic_block(f"rows{n}") for n in range(1, ROWS + 1)]
        choice = b.switch(rows, cases[-1])
        for n, block in enumerate(cases[:-1], 1):
            choice.add_case(i64(n), block)
        for n, block in enumerate(cases, 1):
            b.position_at_end(block)
            places = [b.mul(x_stride, _row(b, index, r, has_index)) for r in range(n)]
            x_at = [b.add(x, place) for place in places]
            _emit(b, width, weight, stride, bias, x_at, pairs, out, out_stride, is_set(b, rounds))
            b.branch(done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return signature, generate


def _row(b: Any, index: Any, r: int, has_index: int) -> Any:
    return load(b, I64, b.add(index, i64(8 * r)), 8) if has_index else i64(r)


def _emit(
    b: Any, size: int, weight: Any, stride: Any, bias: Any, x_at: list[Any], pairs: Any, out: Any,
    out_stride: Any, rounds: Any,
) -> None:  # fmt: skip
    """Emits `multiply` for the rows of x at these addresses. rounds: a mask of lanes."""
    n, step_bytes = len(x_at), 2 * LANES * size
    at = [b.add(weight, b.mul(stride, i64(i))) for i in range(OUTPUTS)]

    def add(pair: Any, sums: list[Any]) -> list[Any]:
        new = list(sums)
        step, w_step = b.mul(pair, i64(8 * LANES)), b.mul(pair, i64(step_bytes))
        numbers = [
            [load(b, FLOATS, b.add(b.add(row, step), i64(64 * i)), 4) for i in range(2)]
            for row in x_at
        ]
        for i in range(OUTPUTS):
            place = b.add(at[i], w_step)
            for line in range(0, step_bytes, _LINE):
                prefetch(b, b.add(place, i64(_FETCHED_AHEAD + line)))
            for j in range(2):
                w = _weights(b, size, b.add(place, i64(LANES * size * j)))
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
        # Sums of a row's outputs must be adjacent.
        order = sorted(range(together * OUTPUTS), key=places.__getitem__)
        put: list[Any] = [None] * (together * OUTPUTS)
        for lane, position in enumerate(order):
            r, i = divmod(lane, OUTPUTS)
            put[position] = new[i * n + row + r]
        found = _sums(b, put)
        lanes = sorted(places)
        wide = [biases, ir.Constant(biases.type, ir.Undefined)]
        spread = [lane % OUTPUTS for lane in range(LANES)]
        own = [lanes[i % len(lanes)] for i in range(LANES)]
        value = b.fadd(shuffle(b, found, found, own), shuffle(b, *wide, spread))
        value = to_bf16_where(b, rounds, value)
        for r in range(together):
            place = b.add(out, b.mul(out_stride, i64(row + r)))
            kept = list(range(r * OUTPUTS, (r + 1) * OUTPUTS))
            store(b, shuffle(b, value, value, kept), place, 4)
        row += together


@intrinsic
def widen_row(typing: Any, weight: Any, pairs: Any, out: Any) -> Any:
    """Writes `pairs` of vectors of bfloat16 numbers from `weight` to `out` as float32."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        weight, pairs, out = arguments

        def copy(pair: Any, carried: list[Any]) -> list[Any]:
            source, target = b.add(weight, b.mul(pair, i64(64))), b.add(out, b.mul(pair, i64(128)))
            for j in range(2):
                numbers = load_bf16_lanes(b, b.add(source, i64(32 * j)))
                store(b, numbers, b.add(target, i64(64 * j)), 4)
            return []

        repeat(b, pairs, [], copy)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@cache
def product_worker(code: Code) -> int:
    """Returns the address of void(task, _), which every thread runs. code: format of unquantised weights.

    If x has more rows than a tile and the weight is bfloat16, a thread first widens its rows of the weight,
    and multiplies by the widened rows.
    """
    most, at_once, size = ROWS, OUTPUTS, number_bytes(code)

    def work(task: int, _: int) -> None:
        weight, stride = load_i64(task + Product.WEIGHT), load_i64(task + Product.STRIDE)
        outputs, columns = load_i64(task + Product.OUTPUTS), load_i64(task + Product.COLUMNS)
        x, x_stride = load_i64(task + Product.X), load_i64(task + Product.X_STRIDE)
        out, out_stride = load_i64(task + Product.OUT), load_i64(task + Product.OUT_STRIDE)
        rows, chunk, bias, rounds = (
            load_i64(task + Product.ROWS),
            load_i64(task + Product.CHUNK),
            load_i64(task + Product.BIAS),
            load_i64(task + Product.ROUNDS),
        )
        pairs = columns // 32
        tiles = (rows + most - 1) // most
        room = load_i64(task + Product.SCRATCH)
        widens = size == 2 and tiles > 1 and room != 0
        if widens:
            room += fetch_add(task + Product.TICKET, 1) * load_i64(task + Product.SCRATCH_STRIDE)
        while True:
            first = fetch_add(task + Product.NEXT, chunk)
            if first >= outputs:
                return
            end = min(outputs, first + chunk)
            first = min(first, outputs - at_once)  # repeats earlier outputs, with the same result
            if widens:
                for output in range(first, end):
                    widen_row(
                        weight + output * stride, pairs, room + (output - first) * 4 * columns
                    )
            for tile in range(tiles):
                start = rows * tile // tiles
                n = rows * (tile + 1) // tiles - start
                a = x + start * x_stride
                output = first
                while output < end:
                    at = min(output, end - at_once)
                    c, d = out + start * out_stride + 4 * at, bias + 4 * at
                    if widens:
                        w = room + (at - first) * 4 * columns
                        multiply(4, 0, n, w, 4 * columns, d, a, x_stride, 0, pairs, c, out_stride,
                                 rounds)  # fmt: skip
                    else:
                        w = weight + at * stride
                        multiply(size, 0, n, w, stride, d, a, x_stride, 0, pairs, c, out_stride,
                                 rounds)  # fmt: skip
                    output += at_once

    return compiled_worker(work)


def number_bytes(code: Code) -> int:
    """Returns the bytes of one number of a weight."""
    return 4 if code is Code.FLOAT32 else 2
