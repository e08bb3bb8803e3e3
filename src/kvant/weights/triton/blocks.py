"""Gluon kernels of products of e4m3 by e4m3 in blocks of 128 x 128 on Hopper GPUs.

Warps of a program have parts of their own. One group copies tiles into a ring in shared memory; two others
multiply 64 rows of x each, so that tensor cores work for one while the other scales its sums. A program takes
tile after tile, and tiles of the next come in while results of this one are written.

`a` [2 * STAGES, 64, 128]: rows of x. `b` [HALVES * STAGES, 128, 128]: rows of the weight. `full` and `empty`
[STAGES, 1]: barriers of a place in the ring, whose n-th use is step n of the program.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.9 has other names for copies than 3.6.
_NEW = hasattr(tma, "async_load")
copy_box = tma.async_load if _NEW else tma.async_copy_global_to_shared
copy_rows = async_copy.async_load if _NEW else async_copy.async_copy_global_to_shared

PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
"""The layout of sums of a group of four warps."""

ROW = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
"""The layout of what rows of sums have."""

WRITTEN = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
"""The layout in which results of 16 bits are written: 16 bytes of each thread."""


@gluon.jit
def ring(weight, HALVES: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Returns a, b, full and empty. ARRIVALS: at `full`, until a place is filled."""
    a = gl.allocate_shared_memory(weight.dtype, [2 * STAGES, 64, 128], weight.layout)
    b = gl.allocate_shared_memory(weight.dtype, [HALVES * STAGES, 128, 128], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=2)
    return a, b, full, empty


@gluon.jit
def idle(n, full, empty, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Takes part in a tile of which the group has no rows; returns the next n."""
    for _ in range(0, STEPS):
        mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
        mbarrier.arrive(empty.index(n % STAGES), count=1)
        n += 1
    return n


@gluon.jit
def sums(
    n, a, b, full, empty, own_at, first_at, second_at, GROUP: gl.constexpr, HALVES: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """Returns two float32 [64, 128] and the next n: sums of a group's rows times rows of a weight, and times
    the next 128 if HALVES is 2.

    own_at: pointers [64] to scales of rows of x. first_at, second_at: pointers to scales of both halves of
    the weight's rows. FENCE: rows of x were not copied in boxes.
    """
    zeros = gl.full([64, 128], 0.0, gl.float32, PRODUCT)
    low = zeros
    high = zeros
    own = gl.load(own_at)
    by_first = gl.load(first_at)
    by_second = gl.load(second_at)
    for s in range(0, STEPS):
        place = n % STAGES
        further = gl.minimum(s + 1, STEPS - 1)
        next_own = gl.load(own_at + further)
        next_first = gl.load(first_at + further)
        next_second = gl.load(second_at + further)
        mbarrier.wait(full.index(place), (n // STAGES) & 1)
        if FENCE:
            fence_async_shared()
        rows = a.index(2 * place + GROUP)
        going = warpgroup_mma(
            rows, b.index(HALVES * place).permute([1, 0]), zeros, use_acc=False, is_async=True
        )
        found = warpgroup_mma_wait(num_outstanding=0, deps=[going])
        if HALVES == 2:
            low += found * (own * by_first)[:, None]
            going = warpgroup_mma(
                rows, b.index(2 * place + 1).permute([1, 0]), zeros, use_acc=False, is_async=True
            )
            # Waiting with the sums makes the compiler finish them first: both at once would need more
            # registers than a thread has.
            found, low = warpgroup_mma_wait(num_outstanding=0, deps=[going, low])
            mbarrier.arrive(empty.index(place), count=1)
            high += found * (own * by_second)[:, None]
        else:
            mbarrier.arrive(empty.index(place), count=1)
            low += found * (own * by_first)[:, None]
        own = next_own
        by_first = next_first
        by_second = next_second
        n += 1
    return low, high, n


@gluon.jit
def copy_step(
    n, x, start, weight, row, s, a, b, full, empty, HALVES: gl.constexpr, STAGES: gl.constexpr
):
    """Copies 128 columns, of step s of a tile, of 128 rows of x and of 128 * HALVES rows of a weight."""
    place = n % STAGES
    bar = full.index(place)
    mbarrier.wait(empty.index(place), (n // STAGES + 1) & 1)
    mbarrier.expect(bar, 2 * x.block_type.nbytes + HALVES * weight.block_type.nbytes)
    copy_box(x, [start, s * 128], bar, a.index(2 * place))
    copy_box(x, [start + 64, s * 128], bar, a.index(2 * place + 1))
    copy_box(weight, [row, s * 128], bar, b.index(HALVES * place))
    if HALVES == 2:
        copy_box(weight, [row + 128, s * 128], bar, b.index(2 * place + 1))


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, a, b, full, empty, end, x_scales, scales, out, tokens, N, tiles,
    COLUMNS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    steps: gl.constexpr = COLUMNS // 128
    n = 0
    for t in range(gl.program_id(0), end, gl.num_programs(0)):
        start = t // tiles * 128 + GROUP * 64
        stripe = t % tiles * HALVES
        if start < tokens:
            i = start + gl.arange(0, 64, layout=ROW)
            own_at = x_scales + gl.where(i < tokens, i, 0).to(gl.int64) * steps
            last = gl.minimum(stripe + HALVES - 1, (N - 1) // 128)
            low, high, n = sums(
                n, a, b, full, empty, own_at, scales + stripe * steps, scales + last * steps,
                GROUP, HALVES, steps, STAGES, False,
            )  # fmt: skip
            i = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WRITTEN))
            m = stripe * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, WRITTEN))
            to = out + i.to(gl.int64)[:, None] * N + m[None, :]
            there = (i < tokens)[:, None]
            y = gl.convert_layout(low.to(out.dtype.element_ty), WRITTEN)
            gl.store(to, y, mask=there & (m < N)[None, :])
            if HALVES == 2:
                y = gl.convert_layout(high.to(out.dtype.element_ty), WRITTEN)
                gl.store(to + 128, y, mask=there & (m + 128 < N)[None, :])
        else:
            n = idle(n, full, empty, steps, STAGES)


@gluon.jit
def _copy(
    x, weight, end, a, b, full, empty, tiles, COLUMNS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    n = 0
    for t in range(gl.program_id(0), end, gl.num_programs(0)):
        start = t // tiles * 128
        row = t % tiles * (128 * HALVES)
        for s in range(0, COLUMNS // 128):
            copy_step(n, x, start, weight, row, s, a, b, full, empty, HALVES, STAGES)
            n += 1


@gluon.jit(do_not_specialize=("tokens",))
def product_of_blocks(
    x, x_scales, weight, scales, out, tokens, N, COLUMNS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Program: every num_programs-th tile of 128 rows of x times 128 * HALVES rows of the weight.

    x: descriptor of codes [tokens, COLUMNS] in boxes of 64 x 128; x_scales: float32 [tokens, COLUMNS / 128].
    weight: descriptor of codes [N, COLUMNS] in boxes of 128 x 128; scales: float32 [ceil(N / 128), COLUMNS /
    128]. out: [tokens, N]. Sums over a block of columns are scaled in float32.
    """
    tiles = (N + 128 * HALVES - 1) // (128 * HALVES)
    end = (tokens + 127) // 128 * tiles
    a, b, full, empty = ring(weight, HALVES, STAGES, 1)
    gl.warp_specialize(
        [
            (_multiply, (0, a, b, full, empty, end, x_scales, scales, out, tokens, N, tiles,
                         COLUMNS, HALVES, STAGES)),
            (_multiply, (1, a, b, full, empty, end, x_scales, scales, out, tokens, N, tiles,
                         COLUMNS, HALVES, STAGES)),
            (_copy, (x, weight, end, a, b, full, empty, tiles, COLUMNS, HALVES, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
