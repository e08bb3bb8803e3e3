"""Operations between two products, one row at a time, in float32.

Values round where transformers' modules round, up to the order of sums. With `ROUNDS`, for models that
compute in bfloat16, they round to bfloat16 numbers. A row's result depends on the row alone.
"""

from __future__ import annotations

from functools import partial
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
    is_set,
    load,
    load_f32,
    load_i64,
    repeat,
    root,
    shuffle,
    splat,
    store,
    store_f32,
    to_bf16_if,
    to_bf16_where,
)
from kvant.models.cpu.layout import Gate, GateHeads, Norm, Rotate

ROWS_AT_ONCE = 4
_PLAIN, _ADD, _ADD_ONLY_HERE = 0, 1, 2
_ONE = np.float32(1)


def _loop(b: Any, vectors: Any, start: list[Any], body: Any) -> list[Any]:
    """Calls body(offset in bytes, carried vectors) -> carried vectors `vectors` times, at least once."""
    return repeat(b, vectors, start, lambda i, carried: body(b.mul(i, i64(4 * LANES)), carried))


def lane_sum(b: Any, x: Any) -> Any:
    """Returns the sum of the lanes of FLOATS, in a fixed tree."""
    half = LANES // 2
    while half:
        lanes = [(lane + half) % LANES for lane in range(LANES)]
        x = b.fadd(x, shuffle(b, x, x, lanes))
        half //= 2
    return b.extract_element(x, ir.Constant(ir.IntType(32), 0))


@intrinsic(prefer_literal=True)
def squares(
    typing: Any, mode: Any, x: Any, residual: Any, vectors: Any, rounds: Any
) -> Any:  # fmt: skip
    """Returns the sum of squares of x, or of x + residual; mode _ADD stores x + residual in residual."""
    how = mode.literal_value
    signature = types.float32(mode, *[types.int64] * 4)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, residual, vectors, rounds = arguments
        where = is_set(b, rounds)

        def add(offset: Any, carried: list[Any]) -> list[Any]:
            value = load(b, FLOATS, b.add(x, offset), 4)
            if how != _PLAIN:
                place = b.add(residual, offset)
                value = to_bf16_where(b, where, b.fadd(value, load(b, FLOATS, place, 4)))
                if how == _ADD:
                    store(b, value, place, 4)
            return [fma(b, value, value, carried[0])]

        return lane_sum(b, _loop(b, vectors, [every(FLOATS, 0.0)], add)[0])

    return signature, generate


@intrinsic(prefer_literal=True)
def scaled(
    typing: Any, mode: Any, x: Any, residual: Any, factor: Any, weight: Any, out: Any, vectors: Any,
    rounds: Any, first: Any,
) -> Any:  # fmt: skip
    """Writes weight * (factor * x) to out; mode _ADD_ONLY_HERE uses x + residual.

    first: rounds factor * x too.
    """
    how = mode.literal_value
    signature = types.void(mode, types.int64, types.int64, types.float32, *[types.int64] * 5)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, residual, factor, weight, out, vectors, rounds, first = arguments
        factors, where, before = splat(b, factor), is_set(b, rounds), is_set(b, first)

        def scale(offset: Any, carried: list[Any]) -> list[Any]:
            value = load(b, FLOATS, b.add(x, offset), 4)
            if how == _ADD_ONLY_HERE:
                value = b.fadd(value, load(b, FLOATS, b.add(residual, offset), 4))
                value = to_bf16_where(b, where, value)
            weights = load(b, FLOATS, b.add(weight, offset), 4)
            value = to_bf16_where(b, before, b.fmul(value, factors))
            value = to_bf16_where(b, where, b.fmul(weights, value))
            store(b, value, b.add(out, offset), 4)
            return []

        _loop(b, vectors, [], scale)
        return context.get_dummy_value()

    return signature, generate


def sigmoid_parts(b: Any, x: Any) -> tuple[Any, Any]:
    """Returns n and d with sigmoid(x) = n / d for FLOATS x; neither overflows."""
    one = every(FLOATS, 1.0)
    small = exp_lanes(b, b.fneg(call(b, "llvm.fabs.v16f32", FLOATS, x)))
    above = b.select(b.fcmp_ordered("<", x, every(FLOATS, 0.0)), small, one)
    return above, b.fadd(one, small)


def silu_lanes(b: Any, x: Any) -> Any:
    """Returns x / (1 + e^-x) of FLOATS."""
    above, below = sigmoid_parts(b, x)
    return b.fdiv(b.fmul(x, above), below)


@intrinsic
def silu_mul(typing: Any, gate: Any, up: Any, out: Any, vectors: Any, rounds: Any) -> Any:
    """Writes gate / (1 + e^-gate) * up to out."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        gate, up, out, vectors, rounds = arguments
        where = is_set(b, rounds)

        def multiply(offset: Any, carried: list[Any]) -> list[Any]:
            value = silu_lanes(b, load(b, FLOATS, b.add(gate, offset), 4))
            ups = load(b, FLOATS, b.add(up, offset), 4)
            value = b.fmul(to_bf16_where(b, where, value), ups)
            store(b, to_bf16_where(b, where, value), b.add(out, offset), 4)
            return []

        _loop(b, vectors, [], multiply)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def _sigmoid_mul(typing: Any, x: Any, gate: Any, vectors: Any, rounds: Any) -> Any:
    """Multiplies x by sigmoid(gate), in place; without a gate (0), only rounds x."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, gate, vectors, rounds = arguments
        where, has_gate = is_set(b, rounds), b.icmp_signed("!=", gate, i64(0))
        gates = b.select(has_gate, gate, x)

        def multiply(offset: Any, carried: list[Any]) -> list[Any]:
            place = b.add(x, offset)
            value = to_bf16_where(b, where, load(b, FLOATS, place, 4))
            above, below = sigmoid_parts(b, load(b, FLOATS, b.add(gates, offset), 4))
            factor = to_bf16_where(b, where, b.fdiv(above, below))
            gated = to_bf16_where(b, where, b.fmul(value, factor))
            store(b, b.select(splat(b, has_gate), gated, value), place, 4)
            return []

        _loop(b, vectors, [], multiply)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@njit(error_model="numpy")
def rms_factor(squares: float, width: int, eps: float) -> float:
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
    r16, first16 = load_i64(task + Norm.ROUNDS), load_i64(task + Norm.ROUNDS_FIRST)
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
                factor = rms_factor(squares(0, a, c, vectors, r16), width, eps)
                scaled(0, a, c, factor, weight, to, vectors, r16, first16)
            elif index:  # a row may be chosen twice, so its sum is not stored
                factor = rms_factor(squares(2, a, c, vectors, r16), width, eps)
                scaled(2, a, c, factor, weight, to, vectors, r16, first16)
            else:
                factor = rms_factor(squares(1, a, c, vectors, r16), width, eps)
                scaled(0, c, c, factor, weight, to, vectors, r16, first16)


def _rotate(task: int, _: int) -> None:
    rows, eps = load_i64(task + Rotate.ROWS), float_of(load_i64(task + Rotate.EPS))
    q_heads, kv_heads = load_i64(task + Rotate.Q_HEADS), load_i64(task + Rotate.KV_HEADS)
    head_dim, qkv = load_i64(task + Rotate.HEAD_DIM), load_i64(task + Rotate.QKV)
    stride, q_stride = load_i64(task + Rotate.STRIDE), load_i64(task + Rotate.Q_STRIDE)
    half = load_i64(task + Rotate.HALF)
    r16, first16 = load_i64(task + Rotate.ROUNDS), load_i64(task + Rotate.ROUNDS_FIRST)
    while True:
        first = fetch_add(task + Rotate.NEXT, ROWS_AT_ONCE)
        if first >= rows:
            return
        for row in range(first, min(rows, first + ROWS_AT_ONCE)):
            start = qkv + row * stride
            cos = load_i64(task + Rotate.COS) + row * half * 4
            sin = load_i64(task + Rotate.SIN) + row * half * 4
            for head in range(q_heads + kv_heads):
                if head < q_heads:
                    at, weight = start + head * q_stride, load_i64(task + Rotate.Q_NORM)
                else:
                    at = start + q_heads * q_stride + (head - q_heads) * head_dim * 4
                    weight = load_i64(task + Rotate.K_NORM)
                if weight:
                    factor = rms_factor(squares(0, at, at, head_dim // 16, 0), head_dim, eps)
                    scaled(0, at, at, factor, weight, at, head_dim // 16, r16, first16)
                for i in range(0, 4 * half, 4):
                    a, b = load_f32(at + i), load_f32(at + 4 * half + i)
                    c, s = load_f32(cos + i), load_f32(sin + i)
                    if r16:
                        x = to_bf16_if(r16, a * c) - to_bf16_if(r16, b * s)
                        y = to_bf16_if(r16, b * c) + to_bf16_if(r16, a * s)
                        store_f32(at + i, to_bf16_if(r16, x))
                        store_f32(at + 4 * half + i, to_bf16_if(r16, y))
                    else:
                        store_f32(at + i, a * c - b * s)
                        store_f32(at + 4 * half + i, b * c + a * s)


def _gate(task: int, _: int) -> None:
    rows, width = (
        load_i64(task + Gate.ROWS) * load_i64(task + Gate.TIMES),
        load_i64(task + Gate.WIDTH),
    )
    gate_up, out = load_i64(task + Gate.GATE_UP), load_i64(task + Gate.OUT)
    r16 = load_i64(task + Gate.ROUNDS)
    while True:
        first = fetch_add(task + Gate.NEXT, ROWS_AT_ONCE)
        if first >= rows:
            return
        for row in range(first, min(rows, first + ROWS_AT_ONCE)):
            gate = gate_up + row * 8 * width
            silu_mul(gate, gate + 4 * width, out + row * 4 * width, width // 16, r16)


def _gate_heads(task: int, _: int) -> None:
    rows, heads = load_i64(task + GateHeads.ROWS), load_i64(task + GateHeads.HEADS)
    head_dim, gates = load_i64(task + GateHeads.HEAD_DIM), load_i64(task + GateHeads.GATES)
    r16 = load_i64(task + GateHeads.ROUNDS)
    while True:
        first = fetch_add(task + GateHeads.NEXT, ROWS_AT_ONCE)
        if first >= rows:
            return
        for row in range(first, min(rows, first + ROWS_AT_ONCE)):
            for head in range(heads):
                x = load_i64(task + GateHeads.X) + (row * heads + head) * head_dim * 4
                gate = gates
                if gates:
                    gate += row * load_i64(task + GateHeads.STRIDE)
                    gate += head * load_i64(task + GateHeads.HEAD_STRIDE)
                _sigmoid_mul(x, gate, head_dim // 16, r16)


norm_worker = partial(compiled_worker, _norm)
rotate_worker = partial(compiled_worker, _rotate)
gate_worker = partial(compiled_worker, _gate)
gate_heads_worker = partial(compiled_worker, _gate_heads)
