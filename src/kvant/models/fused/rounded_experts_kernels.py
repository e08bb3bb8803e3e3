"""Gluon kernels of `kvant.models.fused.rounded_experts`: e4m3 times e4m3 in blocks of 128 x 128.

Programs and rings in shared memory: see `kvant.weights.triton.blocks`. What a tile needs of lists is read one
or two tiles before, since each read waits for the one before it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.weights.triton.blocks import (
    ROW,
    WRITTEN,
    copy_box,
    copy_rows,
    copy_step,
    idle,
    ring,
    sums,
)

_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
"""The layout in which codes are copied and written: 16 bytes of each thread."""


@gluon.jit
def _activated(gate, up):
    """Activates float32 sums; rounds to bfloat16 where transformers' modules round. NaN stays NaN."""
    gate = gate.to(gl.bfloat16).to(gl.float32)
    up = up.to(gl.bfloat16).to(gl.float32)
    silu = (gate / (1.0 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32)
    return (silu * up).to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _quotients(x, scale):
    """Returns x [64, 128] / scale [64, 1] as IEEE division rounds it, for x that was 16 bits wide.

    An instruction of division has a slow path, which costs three times as much. A quotient by the rounded
    reciprocal, corrected once, has the same bits for every mantissa of x and scale. Tiny scales and their
    numbers are lifted, so that nothing underflows.
    """
    lift = gl.where(scale < 2.0**-60, 2.0**100, 1.0)
    # Both factors of `near` are negative, so that zeros keep their signs.
    divisor, negative = scale * lift, x * -lift
    share = gl.div_rn(gl.full([64, 1], -1.0, gl.float32, divisor.type.layout), divisor)
    near = negative * share
    return gl.fma(gl.fma(near, divisor, negative), share, near)


@gluon.jit
def _saturated(x):
    low = gl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return gl.minimum(low, 448.0, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _listed(table, block):
    """Returns the expert, the first pair and the end of the pairs of a block."""
    at = table + block * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _pairs(order, start, stop, layout: gl.constexpr):
    """Returns the pairs from `start` on, int32 [64]; 0 from `stop` on."""
    i = start + gl.arange(0, 64, layout=layout)
    return gl.load(order + i, mask=i < stop, other=0)


@gluon.jit
def _multiply_gates(
    GROUP: gl.constexpr, a, b, full, empty, end, x_scales, scales, order, table, codes, code_scales,
    TOP_K: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    width: gl.constexpr = N // 2
    tiles: gl.constexpr = width // 128
    steps: gl.constexpr = COLUMNS // 128
    n = 0
    every = gl.num_programs(0)
    expert, start, stop = _listed(table, gl.minimum(gl.program_id(0), end - 1) // tiles)
    pair = _pairs(order, start + GROUP * 64, stop, ROW)
    next_expert, next_start, next_stop = _listed(
        table, gl.minimum(gl.program_id(0) + every, end - 1) // tiles
    )
    for t in range(gl.program_id(0), end, every):
        next_pair = _pairs(order, next_start + GROUP * 64, next_stop, ROW)
        last_expert, last_start, last_stop = _listed(
            table, gl.minimum(t + 2 * every, end - 1) // tiles
        )
        start += GROUP * 64
        tile = t % tiles
        if start < stop:
            i = start + gl.arange(0, 64, layout=ROW)
            token = pair.to(gl.int64) // TOP_K
            gate_at = scales + (expert * (2 * tiles) + tile) * steps
            gate, up, n = sums(
                n, a, b, full, empty, x_scales + token * steps, gate_at, gate_at + tiles * steps,
                GROUP, 2, steps, STAGES, True,
            )  # fmt: skip
            y = _activated(gate, up)
            scale = gl.max(gl.abs(y), 1) / 448.0
            scale = gl.where(scale > 0, scale, 1.0)
            gl.store(code_scales + i.to(gl.int64) * tiles + tile, scale, mask=i < stop)
            made = _saturated(_quotients(y, scale[:, None])).to(codes.dtype.element_ty)
            i = start + gl.arange(0, 64, layout=gl.SliceLayout(1, _CODES))
            m = tile * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, _CODES))
            to = codes + i.to(gl.int64)[:, None] * width + m[None, :]
            gl.store(to, gl.convert_layout(made, _CODES), mask=(i < stop)[:, None])
        else:
            n = idle(n, full, empty, steps, STAGES)
        pair = next_pair
        expert, start, stop = next_expert, next_start, next_stop
        next_expert, next_start, next_stop = last_expert, last_start, last_stop


@gluon.jit
def _copy_gates(
    x, weight, order, table, end, a, b, full, empty, TOP_K: gl.constexpr, N: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies tokens one by one, where their pairs are in the order of experts."""
    width: gl.constexpr = N // 2
    tiles: gl.constexpr = width // 128
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, _CODES))[None, :]
    rows: gl.constexpr = gl.SliceLayout(1, _CODES)
    n = 0
    every = gl.num_programs(0)
    expert, start, stop = _listed(table, gl.minimum(gl.program_id(0), end - 1) // tiles)
    low_pair = _pairs(order, start, stop, rows)
    high_pair = _pairs(order, start + 64, stop, rows)
    next_expert, next_start, next_stop = _listed(
        table, gl.minimum(gl.program_id(0) + every, end - 1) // tiles
    )
    for t in range(gl.program_id(0), end, every):
        row = expert * N + t % tiles * 128
        i = start + gl.arange(0, 64, layout=rows)
        low_at = x + (low_pair.to(gl.int64) // TOP_K)[:, None] * COLUMNS + k
        high_at = x + (high_pair.to(gl.int64) // TOP_K)[:, None] * COLUMNS + k
        low = (i < stop)[:, None] & (k >= 0)
        high = (i + 64 < stop)[:, None] & (k >= 0)
        low_pair = _pairs(order, next_start, next_stop, rows)
        high_pair = _pairs(order, next_start + 64, next_stop, rows)
        expert, start, stop = next_expert, next_start, next_stop
        next_expert, next_start, next_stop = _listed(
            table, gl.minimum(t + 2 * every, end - 1) // tiles
        )
        for s in range(0, COLUMNS // 128):
            place = n % STAGES
            bar = full.index(place)
            mbarrier.wait(empty.index(place), (n // STAGES + 1) & 1)
            mbarrier.expect(bar, 2 * weight.block_type.nbytes)
            copy_box(weight, [row, s * 128], bar, b.index(2 * place))
            copy_box(weight, [row + width, s * 128], bar, b.index(2 * place + 1))
            copy_rows(a.index(2 * place), low_at + s * 128, mask=low)
            copy_rows(a.index(2 * place + 1), high_at + s * 128, mask=high)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            n += 1


@gluon.jit
def gate_rounded(
    x, x_scales, weight, scales, order, table, count, codes, code_scales,
    TOP_K: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Program: every num_programs-th tile of 128 pairs times 128 gates and 128 ups.

    x: codes [T, COLUMNS]; x_scales: float32 [T, COLUMNS / 128]. weight: descriptor of codes [E * N, COLUMNS]
    in boxes of 128 x 128; scales: float32 [E * N / 128, COLUMNS / 128]. order: int32 [pairs], by expert;
    table, count: from `resident_experts_kernels.list_blocks`. codes [pairs, N / 2], code_scales [pairs, N /
    256]: the rounded results, in that order.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    end = gl.load(count) * (N // 256)
    # Each of the 128 threads that copy tokens arrives, and the one that copies boxes once more.
    a, b, full, empty = ring(weight, 2, STAGES, 129)
    gl.warp_specialize(
        [
            (_multiply_gates, (0, a, b, full, empty, end, x_scales, scales, order, table, codes,
                               code_scales, TOP_K, N, COLUMNS, STAGES)),
            (_multiply_gates, (1, a, b, full, empty, end, x_scales, scales, order, table, codes,
                               code_scales, TOP_K, N, COLUMNS, STAGES)),
            (_copy_gates, (x, weight, order, table, end, a, b, full, empty, TOP_K, N, COLUMNS,
                           STAGES)),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip


@gluon.jit
def _multiply_down(
    GROUP: gl.constexpr, a, b, full, empty, end, h_scales, scales, shares, order, table, out,
    N: gl.constexpr, COLUMNS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles: gl.constexpr = N // (128 * HALVES)
    steps: gl.constexpr = COLUMNS // 128
    n = 0
    every = gl.num_programs(0)
    expert, start, stop = _listed(table, gl.minimum(gl.program_id(0), end - 1) // tiles)
    pair = _pairs(order, start + GROUP * 64, stop, ROW)
    next_expert, next_start, next_stop = _listed(
        table, gl.minimum(gl.program_id(0) + every, end - 1) // tiles
    )
    for t in range(gl.program_id(0), end, every):
        share = gl.load(shares + pair)[:, None]
        pair = _pairs(order, next_start + GROUP * 64, next_stop, ROW)
        last_expert, last_start, last_stop = _listed(
            table, gl.minimum(t + 2 * every, end - 1) // tiles
        )
        start += GROUP * 64
        tile = t % tiles
        if start < stop:
            i = start + gl.arange(0, 64, layout=ROW)
            to_pair = _pairs(order, start, stop, gl.SliceLayout(1, WRITTEN)).to(gl.int64)
            own_at = h_scales + gl.where(i < stop, i, 0).to(gl.int64) * steps
            scale_at = scales + (expert * (N // 128) + tile * HALVES) * steps
            low, high, n = sums(
                n, a, b, full, empty, own_at, scale_at, scale_at + (HALVES - 1) * steps,
                GROUP, HALVES, steps, STAGES, False,
            )  # fmt: skip
            i = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WRITTEN))
            there = i < stop
            m = tile * (128 * HALVES) + gl.arange(0, 128, layout=gl.SliceLayout(0, WRITTEN))
            to = out + to_pair[:, None] * N + m[None, :]
            y = gl.convert_layout((low * share).to(out.dtype.element_ty), WRITTEN)
            gl.store(to, y, mask=there[:, None])
            if HALVES == 2:
                y = gl.convert_layout((high * share).to(out.dtype.element_ty), WRITTEN)
                gl.store(to + 128, y, mask=there[:, None])
        else:
            n = idle(n, full, empty, steps, STAGES)
        expert, start, stop = next_expert, next_start, next_stop
        next_expert, next_start, next_stop = last_expert, last_start, last_stop


@gluon.jit
def _copy_down(
    h, weight, table, end, a, b, full, empty, N: gl.constexpr, COLUMNS: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles: gl.constexpr = N // (128 * HALVES)
    n = 0
    every = gl.num_programs(0)
    expert, start, _ = _listed(table, gl.minimum(gl.program_id(0), end - 1) // tiles)
    for t in range(gl.program_id(0), end, every):
        next_expert, next_start, _ = _listed(table, gl.minimum(t + every, end - 1) // tiles)
        row = expert * N + t % tiles * (128 * HALVES)
        for s in range(0, COLUMNS // 128):
            copy_step(n, h, start, weight, row, s, a, b, full, empty, HALVES, STAGES)
            n += 1
        expert, start = next_expert, next_start


@gluon.jit
def down_rounded(
    h, h_scales, weight, scales, shares, order, table, count, out,
    N: gl.constexpr, COLUMNS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Program: every num_programs-th tile of 128 pairs times 128 * HALVES rows.

    h: descriptor of codes [pairs, COLUMNS] in boxes of 64 x 128, in the order of `order`; h_scales: float32
    [pairs, COLUMNS / 128]. weight: descriptor of codes [E * N, COLUMNS] in boxes of 128 x 128; scales:
    float32 [E * N / 128, COLUMNS / 128]. shares: float32 [pairs]; out: [pairs, N], both by pair. HALVES: 1 or
    2. The others: as in `gate_rounded`.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    end = gl.load(count) * (N // (128 * HALVES))
    a, b, full, empty = ring(weight, HALVES, STAGES, 1)
    gl.warp_specialize(
        [
            (_multiply_down, (0, a, b, full, empty, end, h_scales, scales, shares, order, table, out,
                              N, COLUMNS, HALVES, STAGES)),
            (_multiply_down, (1, a, b, full, empty, end, h_scales, scales, shares, order, table, out,
                              N, COLUMNS, HALVES, STAGES)),
            (_copy_down, (h, weight, table, end, a, b, full, empty, N, COLUMNS, HALVES, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
