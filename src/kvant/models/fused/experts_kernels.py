"""Triton kernels for layers of experts. CUDA graphs can record them: none waits for the host.

A pair is one token with one of its experts; pair p belongs to token p // TOP_K. Every kernel may be
launched while the kernel before it still runs (AHEAD); it waits for that kernel before it reads.

Three ways to multiply: `one_gate_up` and `one_down` for single rows, `few` with rows of a weight as the
first operand, `many` with pairs as the first operand.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.weights.triton.kernels import PER_OUTPUT, scale_value, tile_sums

GATED = tl.constexpr(0)  # out [pairs, I] = activation of gate and up of x [T, H]
DOWN = tl.constexpr(1)  # out [pairs, H] = (product of x [pairs, I]) * weight of the pair

NUMBERS = tl.constexpr(-1)  # in place of a code: weights are unquantised

HALVES = tl.constexpr(0)  # rows of gate_up: all gates, then all ups
ALTERNATING = tl.constexpr(1)  # rows of gate_up: gate 0, up 0, gate 1, ..


@triton.jit
def _begin(AHEAD: tl.constexpr):
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _gate_row(m, WIDTH: tl.constexpr, ORDER: tl.constexpr):
    """Returns the row of gate m in gate_up."""
    return m if ORDER == HALVES else 2 * m


@triton.jit
def _up_row(m, WIDTH: tl.constexpr, ORDER: tl.constexpr):
    """Returns the row of up m in gate_up."""
    return WIDTH + m if ORDER == HALVES else 2 * m + 1


@triton.jit
def _activated(gate, up, limit, alpha, CLAMP: tl.constexpr, dtype: tl.constexpr):
    """Activates float32 sums; rounds where transformers' modules round. NaN stays NaN."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if CLAMP:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return ((up + 1.0) * (gate / (1.0 + tl.exp(-gate * alpha)))).to(dtype)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@triton.jit
def route(
    rows, router, bias, ids, weights, residual, norm_weight, normed, eps, factor,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    SOFTMAX_FIRST: tl.constexpr, RENORMALISE: tl.constexpr, ROUNDED: tl.constexpr,
    WIDTH: tl.constexpr, PAD: tl.constexpr, NORM: tl.constexpr, DEPTH: tl.constexpr,
    BIAS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: chooses the experts of one token. The lowest id wins among equal logits.

    ids: int32 [T, TOP_K]; weights: float32 [T, TOP_K]. factor: multiplies weights, with SOFTMAX_FIRST. NORM:
    normed [T, WIDTH] gets the RMS norm of residual [T, WIDTH]. A NaN among the logits makes the weights NaN.
    rows: logits [T, E]. If DEPTH is not 0, residual * norm_weight [T, WIDTH]: the program multiplies its row
    by router [E, WIDTH], DEPTH columns at a time, and adds bias [E] if BIAS.
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E_PAD)
    valid = e < E
    if DEPTH:
        if AHEAD:
            gdc_launch_dependents()
        d = tl.arange(0, DEPTH)
        sums = tl.zeros((E_PAD, DEPTH), tl.float32)
        for start in tl.static_range(0, WIDTH, DEPTH):
            there = start + d < WIDTH
            at = router + e[:, None] * WIDTH + (start + d)[None, :]
            w = tl.load(at, mask=valid[:, None] & there[None, :], other=0.0)
            if AHEAD and start == 0:
                gdc_wait()
            v = tl.load(rows + token * WIDTH + start + d, mask=there, other=0.0)
            sums += w.to(tl.float32) * v.to(tl.float32)[None, :]
    else:
        _begin(AHEAD)
    if NORM:
        c = tl.arange(0, PAD)
        inside = c < WIDTH
        x = tl.load(residual + token * WIDTH + c, mask=inside, other=0.0)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        norm = tl.load(norm_weight + c, mask=inside, other=0.0).to(tl.float32)
        y = (wide * scale).to(x.dtype).to(tl.float32) * norm
        tl.store(normed + token * WIDTH + c, y.to(x.dtype), mask=inside)
    if DEPTH:
        product = tl.sum(sums, 1) * scale
        if BIAS:
            product += tl.load(bias + e, mask=valid, other=0.0).to(tl.float32)
        raw = product.to(router.dtype.element_ty)
    else:
        raw = tl.load(rows + token * E + e, mask=valid, other=0.0)
    score = raw.to(tl.float32)
    high = tl.max(tl.where(valid, score, float("-inf")), 0)
    total = tl.sum(tl.where(valid, tl.exp(score - high), 0.0), 0)
    # One integer orders by score, then by the lowest id: a float's bits, inverted if it is negative.
    bits = (tl.where(score == score, score, float("-inf")) + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    lowest: tl.constexpr = -(2**63)
    key = tl.where(valid, (bits.to(tl.int64) << 32) | (E_PAD - 1 - e).to(tl.int64), lowest)
    k = tl.arange(0, K_PAD)
    chosen = tl.zeros((K_PAD,), tl.int32)
    found_bits = tl.zeros((K_PAD,), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        key = tl.where(key == best, lowest, key)
        chosen = tl.where(k == j, E_PAD - 1 - (best & 0x7FFFFFFF).to(tl.int32), chosen)
        found_bits = tl.where(k == j, (best >> 32).to(tl.int32), found_bits)
    found_bits = found_bits ^ ((found_bits >> 31) & 0x7FFFFFFF)
    value = found_bits.to(tl.float32, bitcast=True)
    real = k < TOP_K
    power = tl.where(real, tl.exp(value - high), 0.0)
    if SOFTMAX_FIRST:
        weight = power / total
        if RENORMALISE:
            weight = weight / tl.sum(weight, 0)
        weight *= factor
    else:
        weight = power / tl.sum(power, 0)
    weight = tl.where(total == total, weight, float("nan"))
    if ROUNDED:
        weight = weight.to(raw.dtype).to(tl.float32)
    tl.store(ids + token * TOP_K + k, chosen, mask=real)
    tl.store(weights + token * TOP_K + k, weight, mask=real)


@triton.jit(do_not_specialize=("pairs", "most"))
def list_pairs(
    ids, lists, counts, pairs, most, CHUNK: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Program: lists the pairs of one expert in order. lists: int32 [E, most]. counts: int32 [E]."""
    _begin(AHEAD)
    expert = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    count = 0
    for start in range(0, pairs, CHUNK):
        pair = start + i
        mine = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        one = mine.to(tl.int32)
        place = count + tl.cumsum(one, 0) - one
        tl.store(lists + expert.to(tl.int64) * most + place, pair, mask=mine)
        count += tl.sum(one, 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=("pairs",))
def count_pairs(
    ids, partial, pairs,
    E_PAD: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: counts the pairs of each expert in one chunk of pairs. partial: int32 [chunks, E_PAD]."""
    _begin(AHEAD)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    e = tl.arange(0, E_PAD)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    hits = (expert[:, None] == e[None, :]).to(tl.int32)
    tl.store(partial + chunk * E_PAD + e, tl.sum(hits, 0))


@triton.jit(do_not_specialize=("chunks",))
def sum_counts(
    partial, places, totals, chunks,
    E_PAD: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: sums the counts of EXPERTS experts; it divides E_PAD. partial, places: int32 [chunks, E_PAD].

    places: an expert's pairs in the chunks before. totals: int32 [E_PAD], all pairs of an expert.
    """
    _begin(AHEAD)
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    s = tl.arange(0, STEP)
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, chunks, STEP):
        at = (first + s)[:, None] * E_PAD + e[None, :]
        there = (first + s < chunks)[:, None]
        counts = tl.load(partial + at, mask=there, other=0)
        before = tl.cumsum(counts, 0) - counts
        tl.store(places + at, total[None, :] + before, mask=there)
        total += tl.sum(counts, 0)
    tl.store(totals + e, total)


@triton.jit(do_not_specialize=("pairs",))
def place_pairs(
    ids, places, totals, order, ends, pairs,
    E: tl.constexpr, E_PAD: tl.constexpr, CHUNK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: writes one chunk of pairs to order, int32 [pairs]: by expert, then ascending.

    ends: int32 [E], the end of each expert's pairs in order; the first program writes it.
    """
    _begin(AHEAD)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    e = tl.arange(0, E_PAD)
    there = pair < pairs
    expert = tl.load(ids + pair, mask=there, other=-1)
    total = tl.load(totals + e)
    until = tl.cumsum(total, 0)
    first = until - total + tl.load(places + chunk * E_PAD + e)
    hits = (expert[:, None] == e[None, :]).to(tl.int32)
    before = tl.cumsum(hits, 0) - hits + first[None, :]
    tl.store(order + tl.sum(hits * before, 1), pair, mask=there)
    if chunk == 0:
        tl.store(ends + e, until, mask=e < E)


@triton.jit
def one_gate_up(
    x, weight, bias, ids, out, limit, alpha,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, ORDER: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: computes ROWS activated outputs of one pair. x: [T, COLUMNS]; out: [pairs, WIDTH]."""
    dtype: tl.constexpr = weight.dtype.element_ty
    _begin(AHEAD)
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = m < WIDTH
    safe = tl.where(inside, m, 0)
    gate_at = weight + (expert * (2 * WIDTH) + _gate_row(safe, WIDTH, ORDER))[:, None] * COLUMNS
    up_at = weight + (expert * (2 * WIDTH) + _up_row(safe, WIDTH, ORDER))[:, None] * COLUMNS
    x_at = x + (pair // TOP_K) * COLUMNS
    gates = tl.zeros((ROWS, BLOCK), tl.float32)
    ups = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        if COLUMNS % BLOCK == 0:
            a = tl.load(gate_at + c[None, :], eviction_policy="evict_first")
            b = tl.load(up_at + c[None, :], eviction_policy="evict_first")
            v = tl.load(x_at + c)
        else:
            a = tl.load(gate_at + c[None, :], mask=(c < COLUMNS)[None, :], other=0.0)
            b = tl.load(up_at + c[None, :], mask=(c < COLUMNS)[None, :], other=0.0)
            v = tl.load(x_at + c, mask=c < COLUMNS, other=0.0)
        v = v.to(tl.float32)[None, :]
        gates += a.to(tl.float32) * v
        ups += b.to(tl.float32) * v
    gate = tl.sum(gates, 1)
    up = tl.sum(ups, 1)
    if BIAS:
        bias_at = bias + expert * (2 * WIDTH)
        gate += tl.load(bias_at + _gate_row(safe, WIDTH, ORDER)).to(tl.float32)
        up += tl.load(bias_at + _up_row(safe, WIDTH, ORDER)).to(tl.float32)
    y = _activated(gate, up, limit, alpha, CLAMP, dtype)
    tl.store(out + pair * WIDTH + m, y, mask=inside)


@triton.jit
def one_down(
    x, weight, bias, ids, weights, residual, out,
    TOP_K: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: sums ROWS columns of one token's result over its experts, in their order.

    x: [pairs, WIDTH]. ADD: residual [T, N] is added to the rounded sum. out: [T, N].
    """
    dtype: tl.constexpr = out.dtype.element_ty
    _begin(AHEAD)
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < N
    safe = tl.where(inside, n, 0).to(tl.int64)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    biases = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + j).to(tl.int64)
        share = tl.load(weights + token * TOP_K + j)
        w_at = weight + (expert * N + safe)[:, None] * WIDTH
        x_at = x + (token * TOP_K + j) * WIDTH
        for start in tl.static_range(0, WIDTH, BLOCK):
            c = start + tl.arange(0, BLOCK)
            if WIDTH % BLOCK == 0:
                a = tl.load(w_at + c[None, :], eviction_policy="evict_first")
                v = tl.load(x_at + c)
            else:
                a = tl.load(w_at + c[None, :], mask=(c < WIDTH)[None, :], other=0.0)
                v = tl.load(x_at + c, mask=c < WIDTH, other=0.0)
            total += a.to(tl.float32) * (v.to(tl.float32) * share)[None, :]
        if BIAS:
            biases += tl.load(bias + expert * N + safe).to(tl.float32) * share
    y = (tl.sum(total, 1) + biases).to(dtype)
    if ADD:
        old = tl.load(residual + token * N + n, mask=inside, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + old).to(dtype)
    tl.store(out + token * N + n, y, mask=inside)


@triton.jit(do_not_specialize=("most", "SCALE_K"))
def few(
    x, weight, scales, zeros, bias, lists, counts, weights, out, limit, alpha, most, SCALE_N, SCALE_K,
    TOP_K: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    PAIRS: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    BIAS: tl.constexpr, CLAMP: tl.constexpr, PRECISION: tl.constexpr, SORTED: tl.constexpr,
    CODE: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ZEROS: tl.constexpr, PTX: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program (stripe of ROWS rows of a weight, expert): multiplies all pairs of the expert, PAIRS at a time.

    weight: [E, N, COLUMNS] for NUMBERS, else the codes of a stack; scales, zeros, SCALE_N, .. ZEROS: as in
    `kvant.weights.triton.kernels.product`. lists: int32 [E, most]; counts: int32 [E]. SORTED: lists holds
    all pairs by expert, and counts the end of each expert's pairs. GATED: the stripe has ROWS // 2 gates and
    their ups, and x is [T, COLUMNS]. DOWN: x is [pairs, COLUMNS].
    """
    dtype: tl.constexpr = x.dtype.element_ty
    _begin(AHEAD)
    stripe = tl.program_id(0)
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + expert)
    begin = expert * most
    if SORTED:
        begin = tl.load(counts + expert - 1, mask=expert > 0, other=0).to(tl.int64)
        count -= begin.to(tl.int32)
    r = tl.arange(0, ROWS)
    HALF: tl.constexpr = ROWS // 2
    if KIND == GATED:
        width: tl.constexpr = N // 2
        m = stripe * HALF + r % HALF
        safe = tl.where(m < width, m, 0)
        n = tl.where(r < HALF, _gate_row(safe, width, ORDER), _up_row(safe, width, ORDER))
    else:
        m = stripe * ROWS + r
        n = tl.where(m < N, m, 0)
    k = tl.arange(0, DEPTH)
    p = tl.arange(0, PAIRS)
    for first in range(0, count, PAIRS):
        there = first + p < count
        pair = tl.load(lists + begin + first + p, mask=there, other=0).to(tl.int64)
        row = pair // TOP_K if KIND == GATED else pair
        acc = tl.zeros((ROWS, PAIRS), tl.float32)
        if CODE == NUMBERS:
            w_at = weight + (expert * N + n)[:, None] * COLUMNS + k[None, :]
            x_at = x + row[None, :] * COLUMNS + k[:, None]
            for s in tl.range(0, COLUMNS, DEPTH, num_stages=STAGES):
                if COLUMNS % DEPTH == 0:
                    a = tl.load(w_at + s)
                    b = tl.load(x_at + s)
                else:
                    a = tl.load(w_at + s, mask=(s + k < COLUMNS)[None, :], other=0.0)
                    b = tl.load(x_at + s, mask=(s + k < COLUMNS)[:, None], other=0.0)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
        else:
            at = expert * N + n
            acc = tile_sums(
                acc, x + row[None, :] * COLUMNS, there, weight, scales, zeros, at, n >= 0, 0, COLUMNS,
                COLUMNS, SCALE_N, SCALE_K, CODE, SHARE, SCALE, GROUP, BLOCK_ROWS, ZEROS, DEPTH, STAGES,
                COLUMNS % DEPTH == 0, PTX, dtype,
            )  # fmt: skip
            if SHARE == PER_OUTPUT:
                acc *= scale_value(tl.load(scales + at * SCALE_N), SCALE)[:, None]
        if BIAS:
            acc += tl.load(bias + expert * N + n).to(tl.float32)[:, None]
        if KIND == GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, PAIRS)), (1, 2, 0)))
            y = _activated(gate, up, limit, alpha, CLAMP, dtype)
            h = stripe * HALF + tl.arange(0, HALF)
            to = out + pair[None, :] * width + h[:, None]
            tl.store(to, y, mask=(h < width)[:, None] & there[None, :])
        else:
            share = tl.load(weights + pair, mask=there, other=0.0)
            y = (acc * share[None, :]).to(out.dtype.element_ty)
            to = out + pair[None, :] * N + m[:, None]
            tl.store(to, y, mask=(m < N)[:, None] & there[None, :])


@triton.jit
def many(
    x, weight, bias, order, ends, weights, out, limit, alpha,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, ORDER: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr,
    PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: PAIRS pairs of one expert times ROWS rows of its weight (GATED: ROWS gates and ROWS ups).

    order: int32 [pairs], by expert; ends: int32 [E]. The grid is sized for the largest number of blocks that
    any choice of experts needs; programs without a block return.
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    _begin(AHEAD)
    width: tl.constexpr = N // 2 if KIND == GATED else N
    tiles = tl.cdiv(width, ROWS)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    e = tl.arange(0, E_PAD)
    end = tl.load(ends + e, mask=e < E, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    blocks = tl.where(e < E, (end - begin + PAIRS - 1) // PAIRS, 0)
    until = tl.cumsum(blocks, 0)
    expert = tl.sum((until <= block).to(tl.int32), 0)
    if expert >= E:
        return
    own = e == expert
    start = tl.sum(tl.where(own, begin + (block - until + blocks) * PAIRS, 0), 0)
    stop = tl.sum(tl.where(own, end, 0), 0)
    i = start + tl.arange(0, PAIRS)
    there = i < stop
    pair = tl.load(order + i, mask=there, other=0).to(tl.int64)
    row = pair // TOP_K if KIND == GATED else pair
    m = tile * ROWS + tl.arange(0, ROWS)
    inside = m < width
    safe = tl.where(inside, m, 0)
    k = tl.arange(0, DEPTH)
    x_at = x + row[:, None] * COLUMNS + k[None, :]
    base = weight + expert.to(tl.int64) * N * COLUMNS
    acc = tl.zeros((PAIRS, ROWS), tl.float32)
    if KIND == GATED:
        gate_at = base + _gate_row(safe, width, ORDER)[None, :] * COLUMNS + k[:, None]
        up_at = base + _up_row(safe, width, ORDER)[None, :] * COLUMNS + k[:, None]
        acc_up = tl.zeros((PAIRS, ROWS), tl.float32)
        for s in tl.range(0, COLUMNS, DEPTH, num_stages=STAGES):
            if COLUMNS % DEPTH == 0:
                a = tl.load(x_at + s)
                b = tl.load(gate_at + s)
                c = tl.load(up_at + s)
            else:
                a = tl.load(x_at + s, mask=(s + k < COLUMNS)[None, :], other=0.0)
                b = tl.load(gate_at + s, mask=(s + k < COLUMNS)[:, None], other=0.0)
                c = tl.load(up_at + s, mask=(s + k < COLUMNS)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            acc_up = tl.dot(a, c, acc_up, input_precision=PRECISION)
        if BIAS:
            bias_at = bias + expert.to(tl.int64) * N
            acc += tl.load(bias_at + _gate_row(safe, width, ORDER)).to(tl.float32)[None, :]
            acc_up += tl.load(bias_at + _up_row(safe, width, ORDER)).to(tl.float32)[None, :]
        y = _activated(acc, acc_up, limit, alpha, CLAMP, dtype)
        at = out + pair[:, None] * width + m[None, :]
        tl.store(at, y, mask=there[:, None] & inside[None, :])
    else:
        w_at = base + safe[None, :] * COLUMNS + k[:, None]
        for s in tl.range(0, COLUMNS, DEPTH, num_stages=STAGES):
            if COLUMNS % DEPTH == 0:
                a = tl.load(x_at + s)
                b = tl.load(w_at + s)
            else:
                a = tl.load(x_at + s, mask=(s + k < COLUMNS)[None, :], other=0.0)
                b = tl.load(w_at + s, mask=(s + k < COLUMNS)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if BIAS:
            acc += tl.load(bias + expert.to(tl.int64) * N + safe).to(tl.float32)[None, :]
        share = tl.load(weights + pair, mask=there, other=0.0)
        y = (acc * share[:, None]).to(out.dtype.element_ty)
        at = out + pair[:, None] * N + m[None, :]
        tl.store(at, y, mask=there[:, None] & inside[None, :])


@triton.jit
def combine(
    parts, out, residual, norm_weight, weighted, squares,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, STREAM: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: sums PAD columns of one token's weighted results [TOP_K, WIDTH] in the order of its experts.

    STREAM: out is residual plus the sum; weighted is out * norm_weight; squares [programs of a token, 64]:
    sums of squares of out.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    if AHEAD:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = part * PAD + tl.arange(0, PAD)
    mask = c < WIDTH
    if STREAM:
        w = tl.load(norm_weight + c, mask=mask, other=0.0).to(tl.float32)
    if AHEAD:
        gdc_wait()
    if STREAM:
        old = tl.load(residual + token * WIDTH + c, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((PAD,), tl.float32)
    for j in tl.static_range(TOP_K):
        at = parts + (token * TOP_K + j) * WIDTH + c
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = total.to(dtype)
    if STREAM:
        y = (y.to(tl.float32) + old).to(dtype)
        wide = y.to(tl.float32)
        tl.store(weighted + token * WIDTH + c, (wide * w).to(dtype), mask=mask)
        tl.store(squares + part * 64 + token, tl.sum(wide * wide, 0))
    tl.store(out + token * WIDTH + c, y, mask=mask)
