"""Triton kernels of `kvant.models.fused.rounded_experts`: e4m3 times e4m3 in blocks of 128 x 128."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.models.fused.experts_kernels import _activated
from kvant.models.fused.resident_experts_kernels import read_block
from kvant.weights.triton.kernels import copied_sums, quotients, saturated


@triton.jit
def gate_rounded(
    x, x_scales, weight, scales, order, table, count, codes, code_scales,
    TOP_K: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr,
    STAGES: tl.constexpr, STAYS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: a tile of PAIRS pairs times 128 gates and 128 ups; every num_programs-th one if it STAYS.

    x: codes [T, COLUMNS]; x_scales: float32 [T, COLUMNS / 128]. weight: descriptor of codes [E * N, COLUMNS];
    scales: float32 [E * N / 128, COLUMNS / 128]. order: int32 [pairs], by expert; table, count: from
    `resident_experts_kernels.list_blocks`. codes [pairs, N / 2], code_scales [pairs, N / 256]: the rounded
    results, in that order.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    width: tl.constexpr = N // 2
    tiles: tl.constexpr = width // 128
    steps: tl.constexpr = COLUMNS // 128
    k = tl.arange(0, 128)
    end = tl.load(count) * tiles
    if not STAYS:
        end = tl.minimum(end, tl.program_id(0) + 1)
    for t in tl.range(tl.program_id(0), end, tl.num_programs(0), flatten=STAYS):
        expert, start, stop = read_block(table, t // tiles)
        tile = t % tiles
        i = start + tl.arange(0, PAIRS)
        there = i < stop
        token = tl.load(order + i, mask=there, other=0).to(tl.int64) // TOP_K
        x_at = x + token[:, None] * COLUMNS + k[None, :]
        own_at = x_scales + token * steps
        gate_at = scales + (expert * (2 * tiles) + tile) * steps
        row = expert * N + tile * 128
        gate = tl.zeros((PAIRS, 128), tl.float32)
        up = tl.zeros((PAIRS, 128), tl.float32)
        for s in tl.range(0, steps, num_stages=STAGES):
            own = tl.load(own_at + s)
            by_gate = own * tl.load(gate_at + s)
            by_up = own * tl.load(gate_at + (tiles * steps + s))
            a = tl.load(x_at + s * 128)
            found = tl.dot(a, weight.load([row, s * 128]).T)
            gate += found * by_gate[:, None]
            # As in `copied_sums`, the sums of gates must be finished first.
            found = tl.dot(a, weight.load([row + width, s * 128]).T, gate * 0.0)
            up += found * by_up[:, None]
        y = _activated(gate, up, 0.0, 0.0, False, tl.bfloat16).to(tl.float32)
        scale = tl.max(tl.abs(y), 1) / 448.0
        scale = tl.where(scale > 0, scale, 1.0)
        made = saturated(quotients(y, scale[:, None]))
        wide = i.to(tl.int64)
        to = codes + wide[:, None] * width + (tile * 128 + k)[None, :]
        tl.store(to, made.to(codes.dtype.element_ty), mask=there[:, None])
        tl.store(code_scales + wide * tiles + tile, scale, mask=there)


@triton.jit
def down_rounded(
    h, h_scales, weight, scales, shares, order, table, count, out,
    N: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, HALVES: tl.constexpr,
    STAGES: tl.constexpr, STAYS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: a tile of PAIRS pairs times 128 * HALVES rows; every num_programs-th one if it STAYS.

    h: descriptor of codes [pairs, COLUMNS], in the order of `order`; h_scales: float32 [pairs, COLUMNS /
    128]. weight: descriptor of codes [E * N, COLUMNS]; scales: float32 [E * N / 128, COLUMNS / 128]. shares:
    float32 [pairs]; out: [pairs, N], both by pair. HALVES: 1 or 2. The others: as in `gate_rounded`.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    tiles: tl.constexpr = N // (128 * HALVES)
    steps: tl.constexpr = COLUMNS // 128
    end = tl.load(count) * tiles
    if not STAYS:
        end = tl.minimum(end, tl.program_id(0) + 1)
    for t in tl.range(tl.program_id(0), end, tl.num_programs(0), flatten=STAYS):
        expert, start, stop = read_block(table, t // tiles)
        tile = t % tiles
        i = start + tl.arange(0, PAIRS)
        there = i < stop
        own_at = h_scales + tl.where(there, i, 0).to(tl.int64) * steps
        row = expert * N + tile * (128 * HALVES)
        scale_at = scales + (expert * (N // 128) + tile * HALVES) * steps
        low, high = copied_sums(
            h, start, own_at, weight, row, scale_at, steps, PAIRS, HALVES, STAGES
        )
        m = tile * (128 * HALVES) + tl.arange(0, 128)
        pair = tl.load(order + i, mask=there, other=0).to(tl.int64)
        share = tl.load(shares + pair, mask=there, other=0.0)[:, None]
        to = out + pair[:, None] * N + m[None, :]
        tl.store(to, (low * share).to(dtype), mask=there[:, None])
        if HALVES == 2:
            tl.store(to + 128, (high * share).to(dtype), mask=there[:, None])
