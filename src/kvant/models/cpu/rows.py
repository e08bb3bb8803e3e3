"""Operations between two products, one row at a time, in float32.

Values round where transformers' modules round, up to the order of sums. A row's result depends on
the row alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kvant.kernels.cpu.compiled import compiled_worker
from kvant.kernels.cpu.vector import (
    FLOATS,
    LANES,
    call,
    every,
    exp_lanes,
    fetch_add,
    float_of,
    fma,
    i64,
    load,
    load_f32,
    load_i64,
    repeat,
    root,
    shuffle,
    splat,
    store,
    store_f32,
)
from kvant.models.cpu.layout import Gate, Norm, Rotate

ROWS_AT_ONCE = 4
_PLAIN, _ADD, _ADD_ONLY_HERE = 0, 1, 2
_ONE = np.float32(1)


def _loop(b: Any, vectors: Any, start: list[Any], body: Any) -> list[Any]:
    """body(offset in bytes, carried vectors) -> carried vectors, `vectors` times, at least once."""
    return repeat(b, vectors, start, lambda i, carried: body(b.mul(i, i64(4 * LANES)), carried))


@intrinsic(prefer_literal=True)
def _squares(typing: Any, mode: Any, x: Any, residual: Any, vectors: Any) -> Any:
    """The sum of squares of x, or of x + residual, which mode _ADD stores in residual's place."""
    how = mode.literal_value
    signature = types.float32(mode, types.int64, types.int64, types.int64)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, residual, vectors = arguments

        def add(offset: Any, carried: list[Any]) -> list[Any]:
            value = load(b, FLOATS, b.add(x, offset), 4)
            if how != _PLAIN:
                place = b.add(residual, offset)
                value = b.fadd(value, load(b, FLOATS, place, 4))
                if how == _ADD:
                    store(b, value, place, 4)
            return [fma(b, value, value, carried[0])]

        total = _loop(b, vectors, [every(FLOATS, 0.0)], add)[0]
        half = LANES // 2
        while half:
            lanes = [(lane + half) % LANES for lane in range(LANES)]
            total = b.fadd(total, shuffle(b, total, total, lanes))
            half //= 2
        return b.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return signature, generate


@intrinsic(prefer_literal=True)
def _scaled(
    typing: Any, mode: Any, x: Any, residual: Any, factor: Any, weight: Any, out: Any, vectors: Any
) -> Any:  # fmt: skip
    """out = weight * (factor * x), in mode _ADD_ONLY_HERE of x + residual."""
    how = mode.literal_value
    signature = types.void(
        mode, types.int64, types.int64, types.float32, types.int64, types.int64, types.int64
    )

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, residual, factor, weight, out, vectors = arguments
        factors = splat(b, factor)

        def scale(offset: Any, carried: list[Any]) -> list[Any]:
            value = load(b, FLOATS, b.add(x, offset), 4)
            if how == _ADD_ONLY_HERE:
                value = b.fadd(value, load(b, FLOATS, b.add(residual, offset), 4))
            weights = load(b, FLOATS, b.add(weight, offset), 4)
            store(b, b.fmul(weights, b.fmul(value, factors)), b.add(out, offset), 4)
            return []

        _loop(b, vectors, [], scale)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _silu_mul(typing: Any, gate: Any, up: Any, out: Any, vectors: Any) -> Any:
    """out = gate / (1 + e^-gate) * up."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        gate, up, out, vectors = arguments
        one, nothing = every(FLOATS, 1.0), every(FLOATS, 0.0)

        def multiply(offset: Any, carried: list[Any]) -> list[Any]:
            x = load(b, FLOATS, b.add(gate, offset), 4)
            size = call(b, "llvm.fabs.v16f32", FLOATS, x)
            small = exp_lanes(b, b.fneg(size))
            # x / (1 + e^-x), and with e^x above the line where e^-x could overflow
            above = b.select(b.fcmp_ordered("<", x, nothing), b.fmul(x, small), x)
            value = b.fdiv(above, b.fadd(one, small))
            ups = load(b, FLOATS, b.add(up, offset), 4)
            store(b, b.fmul(value, ups), b.add(out, offset), 4)
            return []

        _loop(b, vectors, [], multiply)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@njit(error_model="numpy")
def _factor(squares: float, width: int, eps: float) -> float:
    return _ONE / root(squares / np.float32(width) + eps)


def _norm(task: int, _: int) -> None:
    rows, width = load_i64(task + Norm.ROWS), load_i64(task + Norm.WIDTH)
    eps, weight = float_of(load_i64(task + Norm.EPS)), load_i64(task + Norm.WEIGHT)
    x, residual, out = (
        load_i64(task + Norm.X),
        load_i64(task + Norm.RESIDUAL),
        load_i64(task + Norm.OUT),
    )
    index, vectors, size = load_i64(task + Norm.INDEX), width // 16, 4 * width
    while True:
        first = fetch_add(task + Norm.NEXT, ROWS_AT_ONCE)
        if first >= rows:
            return
        for row in range(first, min(rows, first + ROWS_AT_ONCE)):
            at, to = row, out + row * size
            if index:
                at = load_i64(index + 8 * row)
            a, c = x + at * size, residual + at * size
            if residual == 0:
                factor = _factor(_squares(0, a, c, vectors), width, eps)
                _scaled(0, a, c, factor, weight, to, vectors)
            elif index:  # a row may be chosen twice: its sum is stored nowhere
                factor = _factor(_squares(2, a, c, vectors), width, eps)
                _scaled(2, a, c, factor, weight, to, vectors)
            else:
                factor = _factor(_squares(1, a, c, vectors), width, eps)
                _scaled(0, c, c, factor, weight, to, vectors)


def _rotate(task: int, _: int) -> None:
    rows, eps = load_i64(task + Rotate.ROWS), float_of(load_i64(task + Rotate.EPS))
    q_heads, kv_heads = load_i64(task + Rotate.Q_HEADS), load_i64(task + Rotate.KV_HEADS)
    head_dim, qkv = load_i64(task + Rotate.HEAD_DIM), load_i64(task + Rotate.QKV)
    half = head_dim // 2
    while True:
        first = fetch_add(task + Rotate.NEXT, ROWS_AT_ONCE)
        if first >= rows:
            return
        for row in range(first, min(rows, first + ROWS_AT_ONCE)):
            start = qkv + row * (q_heads + 2 * kv_heads) * head_dim * 4
            cos = load_i64(task + Rotate.COS) + row * half * 4
            sin = load_i64(task + Rotate.SIN) + row * half * 4
            for head in range(q_heads + kv_heads):
                at = start + head * head_dim * 4
                weight = load_i64(task + (Rotate.Q_NORM if head < q_heads else Rotate.K_NORM))
                if weight:
                    factor = _factor(_squares(0, at, at, head_dim // 16), head_dim, eps)
                    _scaled(0, at, at, factor, weight, at, head_dim // 16)
                for i in range(0, 4 * half, 4):
                    a, b = load_f32(at + i), load_f32(at + 4 * half + i)
                    c, s = load_f32(cos + i), load_f32(sin + i)
                    store_f32(at + i, a * c - b * s)
                    store_f32(at + 4 * half + i, b * c + a * s)


def _gate(task: int, _: int) -> None:
    rows, width = load_i64(task + Gate.ROWS), load_i64(task + Gate.WIDTH)
    gate_up, out = load_i64(task + Gate.GATE_UP), load_i64(task + Gate.OUT)
    while True:
        first = fetch_add(task + Gate.NEXT, ROWS_AT_ONCE)
        if first >= rows:
            return
        for row in range(first, min(rows, first + ROWS_AT_ONCE)):
            gate = gate_up + row * 8 * width
            _silu_mul(gate, gate + 4 * width, out + row * 4 * width, width // 16)


@cache
def norm_worker() -> int:
    return compiled_worker(_norm)


@cache
def rotate_worker() -> int:
    return compiled_worker(_rotate)


@cache
def gate_worker() -> int:
    return compiled_worker(_gate)
