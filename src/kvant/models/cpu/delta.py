"""One token of each sequence through a gated delta net of Qwen: convolution, delta rule, gated norm.

`kvant.models.recurrent.scan` has the equations. Prompts do not use this code: torch computes them in chunks.
"""

from __future__ import annotations

import math
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
    every,
    fetch_add,
    float_of,
    fma,
    i64,
    is_set,
    load,
    load_bf16_lanes,
    load_f32,
    load_i32,
    load_i64,
    repeat,
    root,
    splat,
    store,
    store_f32,
    to_bf16_if,
    to_bf16_where,
    zero,
)
from kvant.models.cpu.layout import Convolve, Delta
from kvant.models.cpu.rows import lane_sum, rms_factor, scaled, silu_lanes, silu_mul, squares

_CHANNELS_AT_ONCE = 512
_ONE = np.float32(1)
_ZERO = np.float32(0)
_TINY = np.float32(1e-6)
_LINEAR = np.float32(20)
"""Softplus of larger arguments is the argument itself, as in torch."""


@intrinsic(prefer_literal=True)
def _convolve(
    typing: Any, size: Any, x: Any, state: Any, weight: Any, out: Any, channels: Any, vectors: Any, taps: Any,
    is_new: Any, rounds: Any,
) -> Any:  # fmt: skip
    """Convolves channels of one token, 16 per vector, and shifts their states.

    size: bytes of a number of the state. x, state, weight, out: addresses of the first of these channels.
    channels: of a whole row.
    """
    width = size.literal_value
    shorts = ir.VectorType(ir.IntType(16), LANES)

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, x, state, weight, out, channels, vectors, taps, is_new, rounds = arguments
        fresh, where = is_set(b, is_new), is_set(b, rounds)
        state_row, weight_row = b.mul(channels, i64(width)), b.mul(channels, i64(4))
        before = b.sub(taps, i64(1))

        def read(place: Any) -> Any:
            found = load_bf16_lanes(b, place) if width == 2 else load(b, FLOATS, place, 4)
            return b.select(fresh, every(FLOATS, 0.0), found)

        def write(value: Any, place: Any) -> None:
            if width == 4:
                store(b, value, place, 4)
                return
            bits = b.bitcast(
                to_bf16_where(b, is_set(b, i64(1)), value), ir.VectorType(ir.IntType(32), LANES)
            )
            store(b, b.trunc(b.lshr(bits, ir.Constant(bits.type, [16] * LANES)), shorts), place, 2)

        def channel(vector: Any, carried: list[Any]) -> list[Any]:
            newest = load(b, FLOATS, b.add(x, b.mul(vector, i64(4 * LANES))), 4)
            at, weights = (
                b.add(base, b.mul(vector, i64(LANES * bytes_)))
                for base, bytes_ in ((state, width), (weight, 4))
            )

            def tap(i: Any, sums: list[Any]) -> list[Any]:
                place = b.add(at, b.mul(i, state_row))
                old = read(place)
                # The next newer input replaces each input of the state; the token's input replaces the
                # newest.
                is_last = b.icmp_signed("==", b.add(i, i64(1)), before)
                behind = b.select(is_last, place, b.add(place, state_row))
                follows = b.select(splat(b, is_last), newest, read(behind))
                factor = load(b, FLOATS, b.add(weights, b.mul(i, weight_row)), 4)
                found = fma(b, old, factor, sums[0])
                write(follows, place)
                return [found]

            total = repeat(b, before, [every(FLOATS, 0.0)], tap)[0]
            factor = load(b, FLOATS, b.add(weights, b.mul(before, weight_row)), 4)
            total = silu_lanes(b, fma(b, newest, factor, total))
            total = to_bf16_where(b, where, total)
            store(b, total, b.add(out, b.mul(vector, i64(4 * LANES))), 4)
            return []

        repeat(b, vectors, [], channel)
        return context.get_dummy_value()

    return types.void(size, *[types.int64] * 9), generate


def _conv(task: int, _: int) -> None:
    rows, channels = load_i64(task + Convolve.ROWS), load_i64(task + Convolve.CHANNELS)
    taps, rounds = load_i64(task + Convolve.TAPS), load_i64(task + Convolve.ROUNDS)
    pieces = (channels + _CHANNELS_AT_ONCE - 1) // _CHANNELS_AT_ONCE
    while True:
        unit = fetch_add(task + Convolve.NEXT, 1)
        if unit >= rows * pieces:
            return
        row, first = unit // pieces, unit % pieces * _CHANNELS_AT_ONCE
        vectors = min(_CHANNELS_AT_ONCE, channels - first) // 16
        page = load_i64(load_i64(task + Convolve.PAGES) + 8 * row)
        is_new = 0
        if load_i32(load_i64(task + Convolve.STARTS) + 4 * row) <= 0:
            is_new = 1
        x = load_i64(task + Convolve.X) + row * load_i64(task + Convolve.X_STRIDE) + 4 * first
        state = load_i64(task + Convolve.STATE) + page * load_i64(task + Convolve.PAGE_STRIDE)
        weight = load_i64(task + Convolve.WEIGHT) + 4 * first
        out = load_i64(task + Convolve.OUT) + 4 * (row * channels + first)
        if load_i64(task + Convolve.IS_16):
            _convolve(2, x, state + 2 * first, weight, out, channels, vectors, taps, is_new, rounds)
        else:
            _convolve(4, x, state + 4 * first, weight, out, channels, vectors, taps, is_new, rounds)


@intrinsic
def _decay(
    typing: Any, state: Any, keys: Any, k: Any, decay: Any, value: Any, strength: Any, q: Any
) -> Any:  # fmt: skip
    """Updates one row of S and returns S q: S <- decay S, S <- S + strength (value - S k) k."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        state, keys, k, decay, value, strength, q = arguments
        decays, nothing = splat(b, decay), every(FLOATS, 0.0)

        def at(base: Any, i: Any) -> Any:
            return b.add(base, b.mul(i, i64(4 * LANES)))

        def seen(i: Any, carried: list[Any]) -> list[Any]:
            kept = b.fmul(load(b, FLOATS, at(state, i), 4), decays)
            return [fma(b, kept, load(b, FLOATS, at(k, i), 4), carried[0])]

        known = lane_sum(b, repeat(b, keys, [nothing], seen)[0])
        added = splat(b, b.fmul(strength, b.fsub(value, known)))

        def change(i: Any, carried: list[Any]) -> list[Any]:
            kept = b.fmul(load(b, FLOATS, at(state, i), 4), decays)
            new = fma(b, added, load(b, FLOATS, at(k, i), 4), kept)
            store(b, new, at(state, i), 4)
            return [fma(b, new, load(b, FLOATS, at(q, i), 4), carried[0])]

        return lane_sum(b, repeat(b, keys, [nothing], change)[0])

    signature = types.float32(
        types.int64,
        types.int64,
        types.int64,
        types.float32,
        types.float32,
        types.float32,
        types.int64,
    )
    return signature, generate


@intrinsic
def _times(typing: Any, x: Any, factor: Any, out: Any, vectors: Any) -> Any:
    """Writes out = factor * x."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, factor, out, vectors = arguments
        factors = splat(b, factor)

        def one(i: Any, carried: list[Any]) -> list[Any]:
            offset = b.mul(i, i64(4 * LANES))
            value = b.fmul(load(b, FLOATS, b.add(x, offset), 4), factors)
            store(b, value, b.add(out, offset), 4)
            return []

        repeat(b, vectors, [], one)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), generate


@njit(error_model="numpy")
def _unit(x: int, scale: float, out: int, keys: int) -> None:
    """Writes out = scale * x / |x|."""
    length = root(squares(0, x, x, keys // 16, 0) + _TINY)
    _times(x, scale / length, out, keys // 16)


@njit(error_model="numpy")
def _sigmoid(x: float) -> float:
    small = np.float32(math.exp(-abs(x)))
    return (small if x < _ZERO else _ONE) / (_ONE + small)


def _delta(task: int, _: int) -> None:
    rows, heads = load_i64(task + Delta.ROWS), load_i64(task + Delta.HEADS)
    keys, values = load_i64(task + Delta.KEYS), load_i64(task + Delta.VALUES)
    key_heads, stride = load_i64(task + Delta.KEY_HEADS), load_i64(task + Delta.STRIDE)
    channels = 2 * key_heads * keys + heads * values
    eps, rounds = float_of(load_i64(task + Delta.EPS)), load_i64(task + Delta.ROUNDS)
    strongest = float_of(load_i64(task + Delta.STRONGEST))
    ticket = fetch_add(task + Delta.TICKET, 1)
    q = load_i64(task + Delta.SCRATCH) + ticket * load_i64(task + Delta.SCRATCH_STRIDE)
    k = q + 4 * keys
    z = k + 4 * keys  # and 2 * values numbers
    shrink = _ONE / root(np.float32(keys))
    while True:
        unit = fetch_add(task + Delta.NEXT, 1)
        if unit >= rows * heads:
            return
        row, head = unit // heads, unit % heads
        mixed = load_i64(task + Delta.MIXED) + 4 * channels * row
        key_head = head // (heads // key_heads)
        _unit(mixed + 4 * key_head * keys, shrink, q, keys)
        _unit(mixed + 4 * (key_heads + key_head) * keys, _ONE, k, keys)
        v = mixed + 4 * (2 * key_heads * keys + head * values)
        rate = load_f32(load_i64(task + Delta.A) + row * stride + 4 * head)
        rate += load_f32(load_i64(task + Delta.BIAS) + 4 * head)
        if rate <= _LINEAR:
            rate = np.float32(math.log1p(math.exp(rate)))
        decay = np.float32(math.exp(load_f32(load_i64(task + Delta.DECAY) + 4 * head) * rate))
        b = load_f32(load_i64(task + Delta.B) + row * stride + 4 * head)
        strength = to_bf16_if(rounds, _sigmoid(b)) * strongest
        page = load_i64(load_i64(task + Delta.PAGES) + 8 * row)
        state = load_i64(task + Delta.STATE) + page * load_i64(task + Delta.PAGE_STRIDE)
        state += 4 * head * values * keys
        if load_i32(load_i64(task + Delta.STARTS) + 4 * row) <= 0:
            zero(state, 4 * values * keys)
        out = load_i64(task + Delta.OUT) + 4 * (row * heads + head) * values
        for i in range(values):
            found = _decay(
                state + 4 * i * keys, keys // 16, k, decay, load_f32(v + 4 * i), strength, q
            )
            store_f32(out + 4 * i, to_bf16_if(rounds, found))
        factor = rms_factor(squares(0, out, out, values // 16, 0), values, eps)
        scaled(
            0,
            out,
            out,
            factor,
            load_i64(task + Delta.NORM),
            z + 4 * values,
            values // 16,
            rounds,
            rounds,
        )
        # silu(gate) is not rounded before it multiplies, only the product is.
        gate = load_i64(task + Delta.Z) + row * stride + 4 * head * values
        silu_mul(gate, z + 4 * values, out, values // 16, 0)
        if rounds:
            for i in range(values):
                store_f32(out + 4 * i, to_bf16_if(rounds, load_f32(out + 4 * i)))


conv_worker = partial(compiled_worker, _conv)
delta_worker = partial(compiled_worker, _delta)
