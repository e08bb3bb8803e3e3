"""Triton kernels of `benchmarks.expert_copies`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def list_blocks(
    ends, table, count, E: tl.constexpr, E_PAD: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Program: lists one expert's blocks of PAIRS pairs. table: int32 [blocks, 4], the expert, its block's
    first pair and the end of its pairs. count: int32 [1], all blocks; the last program writes it.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    end = tl.load(ends + e, mask=e < E, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
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
def _silu(gate, up, dtype: tl.constexpr):
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    return ((gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)


@triton.jit
def copied(
    x, h, weight, order, table, count, weights, out,
    TOP_K: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: every num_programs-th tile of PAIRS pairs times ROWS rows (GATED: ROWS gates and ROWS ups).

    weight: descriptor of [E * N, COLUMNS]. GATED: x [T, COLUMNS] is read by pointers; out [pairs, N / 2] is
    in the order of `order`, int32 [pairs]. Else: h, a descriptor of such rows; out [pairs, N] is by pair.
    table, count: from `list_blocks`.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = N // 2 if GATED else N
    tiles: tl.constexpr = (width + ROWS - 1) // ROWS
    k = tl.arange(0, DEPTH)
    total = tl.load(count) * tiles
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        at = table + t // tiles * 4
        expert = tl.load(at)
        start = tl.load(at + 1)
        stop = tl.load(at + 2)
        first = t % tiles * ROWS
        base = expert * N + first
        i = start + tl.arange(0, PAIRS)
        there = i < stop
        m = first + tl.arange(0, ROWS)
        mask = there[:, None] & (m < width)[None, :]
        acc = tl.zeros((PAIRS, ROWS), tl.float32)
        if GATED:
            token = tl.load(order + i, mask=there, other=0).to(tl.int64) // TOP_K
            x_at = x + token[:, None] * COLUMNS + k[None, :]
            ups = tl.zeros((PAIRS, ROWS), tl.float32)
            for s in tl.range(0, COLUMNS, DEPTH, num_stages=STAGES):
                if COLUMNS % DEPTH == 0:
                    a = tl.load(x_at + s)
                else:
                    a = tl.load(x_at + s, mask=(s + k < COLUMNS)[None, :], other=0.0)
                b = weight.load([base, s])
                c = weight.load([base + width, s])
                acc = tl.dot(a, b.T, acc)
                ups = tl.dot(a, c.T, ups)
            to = out + i.to(tl.int64)[:, None] * width + m[None, :]
            tl.store(to, _silu(acc, ups, dtype), mask=mask)
        else:
            for s in tl.range(0, COLUMNS, DEPTH, num_stages=STAGES):
                a = h.load([start, s])
                b = weight.load([base, s])
                acc = tl.dot(a, b.T, acc)
            pair = tl.load(order + i, mask=there, other=0).to(tl.int64)
            share = tl.load(weights + pair, mask=there, other=0.0)
            to = out + pair[:, None] * N + m[None, :]
            tl.store(to, (acc * share[:, None]).to(dtype), mask=mask)
