"""Layers of experts: sorts rows by expert, multiplies each expert's rows, and sums a token's results.

A pair is one token with one of its experts. Pairs are sorted by expert, so that an expert's
weights are read once for all of its rows. A token's result depends on the token alone.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvant.kernels.cpu.compiled import compiled_worker
from kvant.kernels.cpu.vector import (
    FLOATS,
    LANES,
    every,
    fetch_add,
    fma,
    i64,
    is_set,
    load,
    load_f32,
    load_i64,
    repeat,
    splat,
    store,
    store_f32,
    store_i64,
    to_bf16_if,
    to_bf16_where,
)
from kvant.models.cpu.layout import Combine, ExpertProduct, Route, Sort
from kvant.models.cpu.product import OUTPUTS, ROWS, multiply, number_bytes, widen_row
from kvant.models.cpu.rows import lane_sum
from kvant.models.cpu.weights import Code

_ZERO = np.float32(0)
_ONE = np.float32(1)
_NOBODY = np.float32(-np.inf)


def _route(task: int, _: int) -> None:
    rows, experts = load_i64(task + Route.ROWS), load_i64(task + Route.EXPERTS)
    top_k, rounds = load_i64(task + Route.TOP_K), load_i64(task + Route.ROUNDS)
    scratch = load_i64(task + Route.SCRATCH) + fetch_add(task + Route.TICKET, 1) * 4 * experts
    while True:
        row = fetch_add(task + Route.NEXT, 1)
        if row >= rows:
            return
        logits = load_i64(task + Route.LOGITS) + 4 * experts * row
        ids = load_i64(task + Route.IDS) + 8 * top_k * row
        weights = load_i64(task + Route.WEIGHTS) + 4 * top_k * row
        largest = _NOBODY
        for i in range(experts):
            largest = max(largest, load_f32(logits + 4 * i))
        total = _ZERO
        for i in range(experts):
            score = np.float32(math.exp(load_f32(logits + 4 * i) - largest))
            total += score
            store_f32(scratch + 4 * i, score)
        chosen = _ZERO
        for place in range(top_k):
            best, most = -1, _NOBODY
            for i in range(experts):
                score = load_f32(scratch + 4 * i)
                is_free = True
                for before in range(place):
                    if load_i64(ids + 8 * before) == i:
                        is_free = False
                # If no score is a number, the first free expert is taken.
                if is_free and (best < 0 or score > most):
                    best, most = i, score
            store_i64(ids + 8 * place, best)
            share = most / total
            store_f32(weights + 4 * place, share)
            chosen += share
        if load_i64(task + Route.RENORMALISE):
            for place in range(top_k):
                share = load_f32(weights + 4 * place) / chosen
                store_f32(weights + 4 * place, share)
        for place in range(top_k):
            share = load_f32(weights + 4 * place)
            store_f32(weights + 4 * place, to_bf16_if(rounds, share))


def _sort(task: int, _: int) -> None:
    if fetch_add(task + Sort.NEXT, 1):
        return  # one thread sorts
    top_k, experts = load_i64(task + Sort.TOP_K), load_i64(task + Sort.EXPERTS)
    pairs, ids = load_i64(task + Sort.ROWS) * top_k, load_i64(task + Sort.IDS)
    starts, active = load_i64(task + Sort.STARTS), load_i64(task + Sort.ACTIVE)
    tokens, places = load_i64(task + Sort.TOKENS), load_i64(task + Sort.PLACES)
    for expert in range(experts + 1):
        store_i64(starts + 8 * expert, 0)
    for pair in range(pairs):
        at = starts + 8 * load_i64(ids + 8 * pair)
        store_i64(at, load_i64(at) + 1)
    begin, used = 0, 0
    for expert in range(experts):
        count = load_i64(starts + 8 * expert)
        store_i64(starts + 8 * expert, begin)
        begin += count
        if count:
            used += 1
            store_i64(active + 8 * used, expert)
    store_i64(active, used)
    for pair in range(pairs):
        at = starts + 8 * load_i64(ids + 8 * pair)
        place = load_i64(at)
        store_i64(at, place + 1)
        store_i64(tokens + 8 * place, pair // top_k)
        store_i64(places + 8 * pair, place)
    for expert in range(experts, 0, -1):  # each entry is now the begin of the next expert
        store_i64(starts + 8 * expert, load_i64(starts + 8 * (expert - 1)))
    store_i64(starts, 0)


@cache
def expert_worker(code: Code, *, indexed: bool) -> int:
    """Returns the address of void(task, _), which every thread runs.

    A thread takes outputs of one expert at a time.
    """
    most, at_once, size, has_index = ROWS, OUTPUTS, number_bytes(code), int(indexed)

    def work(task: int, _: int) -> None:
        stride, outputs = (
            load_i64(task + ExpertProduct.STRIDE),
            load_i64(task + ExpertProduct.OUTPUTS),
        )
        columns, chunk = (
            load_i64(task + ExpertProduct.COLUMNS),
            load_i64(task + ExpertProduct.CHUNK),
        )
        x, x_stride = load_i64(task + ExpertProduct.X), load_i64(task + ExpertProduct.X_STRIDE)
        out, out_stride = (
            load_i64(task + ExpertProduct.OUT),
            load_i64(task + ExpertProduct.OUT_STRIDE),
        )
        starts, active = (
            load_i64(task + ExpertProduct.STARTS),
            load_i64(task + ExpertProduct.ACTIVE),
        )
        bias, rounds = load_i64(task + ExpertProduct.BIAS), load_i64(task + ExpertProduct.ROUNDS)
        room = load_i64(task + ExpertProduct.SCRATCH)
        if room:
            ticket = fetch_add(task + ExpertProduct.TICKET, 1)
            room += ticket * load_i64(task + ExpertProduct.SCRATCH_STRIDE)
        pairs, units = columns // 32, (outputs + chunk - 1) // chunk
        total = load_i64(active) * units
        while True:
            unit = fetch_add(task + ExpertProduct.NEXT, 1)
            if unit >= total:
                return
            expert = load_i64(active + 8 * (1 + unit // units))
            weight = load_i64(task + ExpertProduct.WEIGHT)
            weight += expert * load_i64(task + ExpertProduct.EXPERT_STRIDE)
            first = unit % units * chunk
            end = min(outputs, first + chunk)
            first = min(first, outputs - at_once)
            begin = load_i64(starts + 8 * expert)
            rows = load_i64(starts + 8 * (expert + 1)) - begin
            tiles = (rows + most - 1) // most
            widens = size == 2 and tiles > 1 and room != 0
            if widens:
                for output in range(first, end):
                    widen_row(
                        weight + output * stride, pairs, room + (output - first) * 4 * columns
                    )
            for tile in range(tiles):
                start = begin + rows * tile // tiles
                n = begin + rows * (tile + 1) // tiles - start
                a, index = x + start * x_stride, 0
                if has_index:
                    a, index = x, load_i64(task + ExpertProduct.INDEX) + 8 * start
                output = first
                while output < end:
                    at = min(output, end - at_once)
                    c = out + start * out_stride + 4 * at
                    if widens:
                        w = room + (at - first) * 4 * columns
                        multiply(4, has_index, n, w, 4 * columns, bias, a, x_stride, index, pairs, c,
                                 out_stride, rounds)  # fmt: skip
                    else:
                        w = weight + at * stride
                        multiply(size, has_index, n, w, stride, bias, a, x_stride, index, pairs, c,
                                 out_stride, rounds)  # fmt: skip
                    output += at_once

    return compiled_worker(work)


@intrinsic
def _dot(typing: Any, x: Any, y: Any, vectors: Any) -> Any:
    """Returns the dot product of two rows."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        x, y, vectors = arguments

        def add(i: Any, carried: list[Any]) -> list[Any]:
            at = b.mul(i, i64(4 * LANES))
            left, right = (load(b, FLOATS, b.add(place, at), 4) for place in (x, y))
            return [fma(b, left, right, carried[0])]

        return lane_sum(b, repeat(b, vectors, [every(FLOATS, 0.0)], add)[0])

    return types.float32(*[types.int64] * 3), generate


@intrinsic
def _sum_rows(
    typing: Any, results: Any, places: Any, weights: Any, count: Any, width: Any, out: Any, shared: Any,
    factor: Any, rounds: Any, terms: Any,
) -> Any:  # fmt: skip
    """Writes out [width]: the weighted sum of `count` rows of results, plus factor * shared."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        results, places, weights, count, width, out, shared, factor, rounds, terms = arguments
        where, size, by_term = is_set(b, rounds), b.mul(width, i64(4)), is_set(b, terms)
        has_shared = splat(b, b.icmp_signed("!=", shared, i64(0)))
        beside = b.select(b.icmp_signed("!=", shared, i64(0)), shared, out)
        factors = splat(b, factor)

        def row(vector: Any, carried: list[Any]) -> list[Any]:
            offset = b.mul(vector, i64(4 * LANES))

            def add(i: Any, sums: list[Any]) -> list[Any]:
                place = load(b, ir.IntType(64), b.add(places, b.mul(i, i64(8))), 8)
                at = b.add(b.add(results, b.mul(place, size)), offset)
                weight = splat(b, load(b, ir.FloatType(), b.add(weights, b.mul(i, i64(4))), 4))
                value = to_bf16_where(b, by_term, b.fmul(load(b, FLOATS, at, 4), weight))
                return [to_bf16_where(b, by_term, b.fadd(sums[0], value))]

            # -0.0 plus the first term is exactly that term.
            total = repeat(b, count, [every(FLOATS, -0.0)], add)[0]
            total = to_bf16_where(b, where, total)
            more = to_bf16_where(
                b, where, b.fmul(factors, load(b, FLOATS, b.add(beside, offset), 4))
            )
            with_more = to_bf16_where(b, where, b.fadd(total, more))
            store(b, b.select(has_shared, with_more, total), b.add(out, offset), 4)
            return []

        repeat(b, b.sdiv(width, i64(LANES)), [], row)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, types.float32, types.int64, types.int64), generate


def _combine(task: int, _: int) -> None:
    rows, width = load_i64(task + Combine.ROWS), load_i64(task + Combine.WIDTH)
    top_k, rounds = load_i64(task + Combine.TOP_K), load_i64(task + Combine.ROUNDS)
    gate, shared = load_i64(task + Combine.GATE), load_i64(task + Combine.SHARED)
    while True:
        row = fetch_add(task + Combine.NEXT, 1)
        if row >= rows:
            return
        factor, beside = _ONE, 0
        if shared:
            beside = shared + 4 * width * row
        if gate:
            x = load_i64(task + Combine.X) + 4 * width * row
            logit = to_bf16_if(rounds, _dot(x, gate, width // 16))
            small = np.float32(math.exp(-abs(logit)))
            factor = (small if logit < _ZERO else _ONE) / (_ONE + small)
            factor = to_bf16_if(rounds, factor)
        _sum_rows(
            load_i64(task + Combine.RESULTS), load_i64(task + Combine.PLACES) + 8 * top_k * row,
            load_i64(task + Combine.WEIGHTS) + 4 * top_k * row, top_k, width,
            load_i64(task + Combine.OUT) + 4 * width * row, beside, factor, rounds,
            load_i64(task + Combine.ROUNDS_TERMS),
        )  # fmt: skip


route_worker = partial(compiled_worker, _route)
sort_worker = partial(compiled_worker, _sort)
combine_worker = partial(compiled_worker, _combine)
