"""Triton kernels of `kvant.models.fused.resident_experts`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.models.fused.experts_kernels import _activated


@triton.jit
def list_blocks(
    ends, table, count, E: tl.constexpr, E_PAD: tl.constexpr, PAIRS: tl.constexpr, FOLLOWS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: lists one expert's blocks of PAIRS pairs. table: int32 [blocks, 4], the expert, its block's
    first pair and the end of its pairs. count: int32 [1], all blocks; the last program writes it. FOLLOWS:
    another expert's end lies before `ends`.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    end = tl.load(ends + e, mask=e < E, other=0)
    begin = tl.load(ends + e - 1, mask=(e + FOLLOWS > 0) & (e < E), other=0)
    blocks = tl.where(e < E, (end - begin + PAIRS - 1) // PAIRS, 0)
    first = tl.sum(tl.where(e < expert, blocks, 0), 0)
    own = tl.sum(tl.where(e == expert, blocks, 0), 0)
    start = tl.sum(tl.where(e == expert, begin, 0), 0)
    stop = tl.sum(tl.where(e == expert, end, 0), 0)
    for i in range(own):
        at = table + (first + i) * 4
        tl.store(at, expert)
        tl.store(at + 1, start + i * PAIRS)
        tl.store(at + 2, stop)
    if expert == E - 1:
        tl.store(count, first + own)


@triton.jit
def read_block(table, block):
    """Returns the expert, the first pair and the end of the pairs of a block that `list_blocks` listed."""
    at = table + block * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def gate_blocks(
    x, weight, order, table, count, out,
    TOP_K: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, STAYS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: a tile of PAIRS pairs times ROWS gates and ROWS ups; every num_programs-th one if it STAYS.

    x: [T, COLUMNS]. weight: descriptor of [2 E, N / 2, COLUMNS], gates and ups in turn. order: int32 [pairs],
    by expert; out: [pairs, N / 2], in that order. table, count: from `list_blocks`. One box of the weight
    holds ROWS gates and their ups, so one product has both.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = N // 2
    tiles: tl.constexpr = (width + ROWS - 1) // ROWS
    k = tl.arange(0, DEPTH)
    end = tl.load(count) * tiles
    if not STAYS:
        end = tl.minimum(end, tl.program_id(0) + 1)
    for t in tl.range(tl.program_id(0), end, tl.num_programs(0), flatten=STAYS):
        expert, start, stop = read_block(table, t // tiles)
        first = t % tiles * ROWS
        i = start + tl.arange(0, PAIRS)
        there = i < stop
        token = tl.load(order + i, mask=there, other=0).to(tl.int64) // TOP_K
        m = first + tl.arange(0, ROWS)
        inside = m < width
        acc = tl.zeros((PAIRS, 2 * ROWS), tl.float32)
        x_at = x + token[:, None] * COLUMNS + k[None, :]
        for s in tl.range(0, COLUMNS, DEPTH, num_stages=STAGES):
            if COLUMNS % DEPTH == 0:
                a = tl.load(x_at + s)
            else:
                a = tl.load(x_at + s, mask=(s + k < COLUMNS)[None, :], other=0.0)
            b = weight.load([2 * expert, first, s]).reshape(2 * ROWS, DEPTH)
            acc = tl.dot(a, b.T, acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (PAIRS, 2, ROWS)), (0, 2, 1)))
        y = _activated(gate, up, 0.0, 0.0, False, dtype)
        to = out + i.to(tl.int64)[:, None] * width + m[None, :]
        tl.store(to, y, mask=there[:, None] & inside[None, :])


@triton.jit
def down_blocks(
    h, weight, shares, order, table, count, out,
    N: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, STAYS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: a tile of PAIRS pairs times ROWS rows of the weight; every num_programs-th one if it STAYS.

    h: descriptor of [pairs, COLUMNS], in the order of `order`. weight: descriptor of [E * N, COLUMNS].
    shares: float32 [pairs]; out: [pairs, N], both by pair. The others: as in `gate_blocks`.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    tiles: tl.constexpr = (N + ROWS - 1) // ROWS
    end = tl.load(count) * tiles
    if not STAYS:
        end = tl.minimum(end, tl.program_id(0) + 1)
    for t in tl.range(tl.program_id(0), end, tl.num_programs(0), flatten=STAYS):
        expert, start, stop = read_block(table, t // tiles)
        first = t % tiles * ROWS
        acc = tl.zeros((PAIRS, ROWS), tl.float32)
        for s in tl.range(0, COLUMNS, DEPTH, num_stages=STAGES):
            a = h.load([start, s])
            b = weight.load([expert * N + first, s])
            acc = tl.dot(a, b.T, acc)
        i = start + tl.arange(0, PAIRS)
        there = i < stop
        m = first + tl.arange(0, ROWS)
        inside = m < N
        pair = tl.load(order + i, mask=there, other=0).to(tl.int64)
        share = tl.load(shares + pair, mask=there, other=0.0)
        to = out + pair[:, None] * N + m[None, :]
        tl.store(to, (acc * share[:, None]).to(dtype), mask=there[:, None] & inside[None, :])
