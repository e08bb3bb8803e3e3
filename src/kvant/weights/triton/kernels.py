"""Products of bfloat16 rows with narrow weights, which are decoded in registers.

`product` multiplies decoded tiles by matrix instructions, `vector` multiplies one row without them. Sums are
float32. A scale multiplies sums of codes: per output at the end, per group of inputs after each step. In
finer groups it multiplies the decoded numbers, which rounds them to bfloat16, except e2m1 with a scale that
is a power of two or e4m3, whose products are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.weights.triton.decode import (
    E2M1,
    E4M3,
    INT4,
    decode_e2m1,
    decode_e4m3,
    decode_int4,
    decode_int4_less,
    decode_int8,
)

PER_OUTPUT = tl.constexpr(0)  # scales [rows]
PER_STEP = tl.constexpr(1)  # one block of inputs per step
FINE = tl.constexpr(2)  # several groups per step


@triton.jit
def _halves(
    tile, zeros, dtype: tl.constexpr, CODE: tl.constexpr, ZEROS: tl.constexpr, PTX: tl.constexpr
):
    """Decodes a tile of 4-bit codes into its low and its high halves."""
    if CODE == E2M1:
        low, high = decode_e2m1(tile, dtype, PTX)
    elif ZEROS:
        low, high = decode_int4_less(tile, tl.broadcast_to(zeros, tile.shape), dtype, PTX)
    else:
        low, high = decode_int4(tile, dtype, PTX)
    return low.to(dtype), high.to(dtype)


@triton.jit
def _whole(tile, dtype: tl.constexpr, CODE: tl.constexpr, PTX: tl.constexpr):
    if CODE == E4M3:
        return decode_e4m3(tile, dtype, PTX).to(dtype)
    else:
        return decode_int8(tile, dtype, PTX).to(dtype)


@triton.jit
def scale_value(stored, SCALE: tl.constexpr):
    """Returns stored scales as float32. SCALE: 0 a float, 1 e8m0, 2 e4m3."""
    if SCALE == 1:
        return tl.exp2(stored.to(tl.float32) - 127.0)
    elif SCALE == 2:
        c = stored.to(tl.int32)
        return (c << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        return stored.to(tl.float32)


@triton.jit
def tile_sums(
    acc, x_at, there, weight, scales, zeros, n, inside, lo, hi, COLUMNS, SCALE_N, SCALE_K,
    CODE: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ZEROS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Adds to acc the products of rows n [ROWS] of a weight with TOKENS rows of x, over columns lo to hi.

    x_at: pointers [1, TOKENS] to rows of x; `there` [TOKENS] masks rows that exist. Other names: as in
    `product`. The caller applies scales of outputs, and the factor.
    """
    s_at = scales + (n // BLOCK_ROWS) * SCALE_N
    if ZEROS:
        z_at = zeros + (n // BLOCK_ROWS) * SCALE_N
    if CODE >= INT4:
        HALF: tl.constexpr = DEPTH // 2
        RUN: tl.constexpr = GROUP // 2
        j = tl.arange(0, HALF)
        k = j // RUN * (2 * RUN) + j % RUN
        w_at = weight + n[:, None] * (COLUMNS // 2) + j[None, :]
        for s in tl.range(lo, hi, DEPTH, num_stages=STAGES):
            if EVEN:
                codes = tl.load(w_at + s // 2, eviction_policy="evict_first")
                a = tl.load(x_at + (s + k)[:, None], mask=there[None, :], other=0.0)
                b = tl.load(x_at + (s + RUN + k)[:, None], mask=there[None, :], other=0.0)
            else:
                left = j < (hi - s) // 2
                codes = tl.load(w_at + s // 2, mask=inside[:, None] & left[None, :], other=0)
                a = tl.load(x_at + (s + k)[:, None], mask=there[None, :] & left[:, None], other=0.0)
                b = tl.load(
                    x_at + (s + RUN + k)[:, None], mask=there[None, :] & left[:, None], other=0.0
                )
            if SHARE == FINE:
                GROUPS: tl.constexpr = DEPTH // GROUP
                groups = s // GROUP + tl.arange(0, GROUPS)
                at = groups[None, :] * SCALE_K
                live = inside[:, None] & (groups * GROUP < hi)[None, :]
                g = scale_value(tl.load(s_at[:, None] + at, mask=live, other=0), SCALE)
                z = codes
                if ZEROS:
                    z = _spread(tl.load(z_at[:, None] + at, mask=live, other=0), RUN)
                low, high = _halves(codes, z, dtype, CODE, ZEROS, PTX)
                g = _spread(g, RUN)
                low = (low.to(tl.float32) * g).to(dtype)
                high = (high.to(tl.float32) * g).to(dtype)
                acc = tl.dot(low, a, acc)
                acc = tl.dot(high, b, acc)
            else:
                at = s // GROUP * SCALE_K
                g = scale_value(tl.load(s_at + at, mask=inside, other=0), SCALE)
                z = tl.load(z_at + at, mask=inside, other=0)[:, None] if ZEROS else codes
                low, high = _halves(codes, z, dtype, CODE, ZEROS, PTX)
                found = tl.dot(low, a)
                found = tl.dot(high, b, found)
                acc += found * g[:, None]
    else:
        k = tl.arange(0, DEPTH)
        w_at = weight + n[:, None] * COLUMNS + k[None, :]
        for s in tl.range(lo, hi, DEPTH, num_stages=STAGES):
            if EVEN:
                codes = tl.load(w_at + s, eviction_policy="evict_first")
                a = tl.load(x_at + (s + k)[:, None], mask=there[None, :], other=0.0)
            else:
                left = k < hi - s
                codes = tl.load(w_at + s, mask=inside[:, None] & left[None, :], other=0)
                a = tl.load(x_at + (s + k)[:, None], mask=there[None, :] & left[:, None], other=0.0)
            numbers = _whole(codes, dtype, CODE, PTX)
            if SHARE == PER_OUTPUT:
                acc = tl.dot(numbers, a, acc)
            elif SHARE == PER_STEP:
                g = scale_value(tl.load(s_at + s // GROUP * SCALE_K, mask=inside, other=0), SCALE)
                acc += tl.dot(numbers, a) * g[:, None]
            else:
                GROUPS: tl.constexpr = DEPTH // GROUP
                groups = s // GROUP + tl.arange(0, GROUPS)
                live = inside[:, None] & (groups * GROUP < hi)[None, :]
                at = groups[None, :] * SCALE_K
                g = scale_value(tl.load(s_at[:, None] + at, mask=live, other=0), SCALE)
                g = _spread(g, GROUP)
                acc = tl.dot((numbers.to(tl.float32) * g).to(dtype), a, acc)
    return acc


@triton.jit
def _spread(values, COUNT: tl.constexpr):
    """Repeats each value of [ROWS, groups] COUNT times: [ROWS, groups * COUNT]."""
    wide = tl.broadcast_to(values[:, :, None], (values.shape[0], values.shape[1], COUNT))
    return tl.reshape(wide, (values.shape[0], values.shape[1] * COUNT))


@triton.jit(do_not_specialize=("tokens", "split"))
def product(
    x, weight, scales, zeros, factor, bias, out, partial, arrived, tokens, split, N, COLUMNS, SCALE_N,
    SCALE_K, CODE: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program (a tile of tokens, a stripe of ROWS rows of the weight, one of `split` parts of its columns).

    x: [tokens, COLUMNS]. weight: codes, uint8. scales: the one of group (n // BLOCK_ROWS, k // GROUP) lies at
    n * SCALE_N + k * SCALE_K; zeros alike. factor: float32 [1], read if FACTOR. out: [tokens, N].
    PARTS: split > 1. partial: float32 [programs, split, ROWS, TOKENS], scratch.
    arrived: int32, zeros before and after.
    EVEN: every tile lies within the weight, and all parts have the same length.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    stripe = tl.program_id(1)
    part = tl.program_id(2)
    r = tl.arange(0, ROWS)
    n = stripe * ROWS + r
    inside = n < N
    t = tile * TOKENS + tl.arange(0, TOKENS)
    there = t < tokens
    steps = (COLUMNS + DEPTH - 1) // DEPTH
    span = (steps + split - 1) // split * DEPTH
    lo = part * span
    hi = tl.minimum(lo + span, COLUMNS)
    acc = tile_sums(
        tl.zeros((ROWS, TOKENS), tl.float32), x + t[None, :].to(tl.int64) * COLUMNS, there, weight, scales,
        zeros, n.to(tl.int64), inside, lo, hi, COLUMNS, SCALE_N, SCALE_K, CODE, SHARE, SCALE, GROUP,
        BLOCK_ROWS, ZEROS, DEPTH, STAGES, EVEN, PTX, dtype,
    )  # fmt: skip
    s_at = scales + (n // BLOCK_ROWS) * SCALE_N
    if not PARTS:
        _store(acc, n, inside, t, there, s_at, factor, bias, out, N, SHARE, SCALE, FACTOR, BIAS)
    else:
        at = r[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        place = stripe * tl.num_programs(0) + tile
        parts = partial + place.to(tl.int64) * (split * ROWS * TOKENS)
        tl.store(parts + part * (ROWS * TOKENS) + at, acc)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + place, 1, sem="acq_rel")
        if before == split - 1:
            total = tl.zeros((ROWS, TOKENS), tl.float32)
            for i in range(split):
                total += tl.load(parts + i * (ROWS * TOKENS) + at, cache_modifier=".cg")
            _store(
                total, n, inside, t, there, s_at, factor, bias, out, N, SHARE, SCALE, FACTOR, BIAS
            )
            tl.store(arrived + place, 0)


@triton.jit
def _store(
    acc, n, inside, t, there, s_at, factor, bias, out, N,
    SHARE: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Applies scales and bias of outputs to sums [ROWS, TOKENS], and stores the results."""
    if SHARE == PER_OUTPUT:
        acc *= scale_value(tl.load(s_at, mask=inside, other=0), SCALE)[:, None]
    if FACTOR:
        acc *= tl.load(factor)
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = t[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit
def vector(
    x, weight, scales, zeros, factor, bias, out, N, COLUMNS, SCALE_N, SCALE_K,
    CODE: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows of the weight times one row x [COLUMNS]. Other names: as in `product`.

    BLOCK: columns at a time; a byte of 4-bit codes has two. EVEN: BLOCK divides COLUMNS.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < N
    s_at = scales + (n // BLOCK_ROWS) * SCALE_N
    if ZEROS:
        z_at = zeros + (n // BLOCK_ROWS) * SCALE_N
    NIBBLES: tl.constexpr = CODE >= INT4
    if NIBBLES:
        HALF: tl.constexpr = BLOCK // 2
        RUN: tl.constexpr = GROUP // 2
        GROUPS: tl.constexpr = BLOCK // GROUP
        j = tl.arange(0, HALF)
        k = j // RUN * (2 * RUN) + j % RUN
        g = tl.arange(0, GROUPS)
        w_at = weight + n[:, None].to(tl.int64) * (COLUMNS // 2) + j[None, :]
        totals = tl.zeros((ROWS, GROUPS), tl.float32)
        for s in range(0, COLUMNS, BLOCK):
            left = s + k < COLUMNS
            live = inside[:, None] & left[None, :]
            groups = s // GROUP + g
            there = inside[:, None] & (groups * GROUP < COLUMNS)[None, :]
            at = groups[None, :] * SCALE_K
            if EVEN:
                codes = tl.load(w_at + s // 2, eviction_policy="evict_first")
            else:
                codes = tl.load(w_at + s // 2, mask=live, other=0)
            scale = scale_value(tl.load(s_at[:, None] + at, mask=there, other=0), SCALE)
            a = tl.load(x + s + k, mask=left, other=0.0).to(tl.float32)
            b = tl.load(x + s + RUN + k, mask=left, other=0.0).to(tl.float32)
            if ZEROS:
                z = tl.load(z_at[:, None] + (s + k)[None, :] // GROUP * SCALE_K, mask=live, other=0)
            else:
                z = codes
            low, high = _halves(codes, z, dtype, CODE, ZEROS, PTX)
            y = low.to(tl.float32) * a[None, :] + high.to(tl.float32) * b[None, :]
            totals += tl.sum(tl.reshape(y, (ROWS, GROUPS, RUN)), 2) * scale
        acc = tl.sum(totals, 1)
    elif SHARE == PER_OUTPUT:
        c = tl.arange(0, BLOCK)
        w_at = weight + n[:, None].to(tl.int64) * COLUMNS + c[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for s in range(0, COLUMNS, BLOCK):
            left = s + c < COLUMNS
            if EVEN:
                codes = tl.load(w_at + s, eviction_policy="evict_first")
            else:
                codes = tl.load(w_at + s, mask=inside[:, None] & left[None, :], other=0)
            a = tl.load(x + s + c, mask=left, other=0.0).to(tl.float32)
            total += _whole(codes, dtype, CODE, PTX).to(tl.float32) * a[None, :]
        acc = tl.sum(total, 1)
    else:
        SPREAD: tl.constexpr = BLOCK // GROUP
        c = tl.arange(0, BLOCK)
        g = tl.arange(0, SPREAD)
        w_at = weight + n[:, None].to(tl.int64) * COLUMNS + c[None, :]
        totals = tl.zeros((ROWS, SPREAD), tl.float32)
        for s in range(0, COLUMNS, BLOCK):
            left = s + c < COLUMNS
            groups = s // GROUP + g
            there = inside[:, None] & (groups * GROUP < COLUMNS)[None, :]
            at = groups[None, :] * SCALE_K
            if EVEN:
                codes = tl.load(w_at + s, eviction_policy="evict_first")
            else:
                codes = tl.load(w_at + s, mask=inside[:, None] & left[None, :], other=0)
            scale = scale_value(tl.load(s_at[:, None] + at, mask=there, other=0), SCALE)
            a = tl.load(x + s + c, mask=left, other=0.0).to(tl.float32)
            y = _whole(codes, dtype, CODE, PTX).to(tl.float32) * a[None, :]
            totals += tl.sum(tl.reshape(y, (ROWS, SPREAD, GROUP)), 2) * scale
        acc = tl.sum(totals, 1)
    if SHARE == PER_OUTPUT:
        acc *= scale_value(tl.load(s_at, mask=inside, other=0), SCALE)
    if FACTOR:
        acc *= tl.load(factor)
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def decode_tile(
    weight, scales, zeros, factor, out, N, COLUMNS, SCALE_N, SCALE_K,
    CODE: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows, BLOCK columns): decodes numbers of a weight into out [N, COLUMNS], rounded once."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < N
    s_at = scales + (n // BLOCK_ROWS) * SCALE_N
    if ZEROS:
        z_at = zeros + (n // BLOCK_ROWS) * SCALE_N
    first = tl.program_id(1) * BLOCK
    dtype: tl.constexpr = out.dtype.element_ty
    common = 1.0
    if FACTOR:
        common = tl.load(factor)
    if CODE >= INT4:
        RUN: tl.constexpr = GROUP // 2
        j = tl.arange(0, BLOCK // 2)
        k = first + j // RUN * (2 * RUN) + j % RUN
        live = inside[:, None] & (k < COLUMNS)[None, :]
        codes = tl.load(
            weight + n[:, None].to(tl.int64) * (COLUMNS // 2) + (first // 2 + j)[None, :],
            mask=live, other=0,
        )  # fmt: skip
        at = (k // GROUP)[None, :] * SCALE_K
        z = tl.load(z_at[:, None] + at, mask=live, other=0) if ZEROS else codes
        low, high = _halves(codes, z, dtype, CODE, ZEROS, PTX)
        scale = scale_value(tl.load(s_at[:, None] + at, mask=live, other=0), SCALE) * common
        to = out + n[:, None].to(tl.int64) * COLUMNS + k[None, :]
        tl.store(to, (low.to(tl.float32) * scale).to(out.dtype.element_ty), mask=live)
        tl.store(to + RUN, (high.to(tl.float32) * scale).to(out.dtype.element_ty), mask=live)
    else:
        k = first + tl.arange(0, BLOCK)
        live = inside[:, None] & (k < COLUMNS)[None, :]
        at = n[:, None].to(tl.int64) * COLUMNS + k[None, :]
        numbers = _whole(tl.load(weight + at, mask=live, other=0), dtype, CODE, PTX).to(tl.float32)
        if SHARE == PER_OUTPUT:
            scale = scale_value(tl.load(s_at, mask=inside, other=0), SCALE)[:, None] * common
        else:
            where = s_at[:, None] + (k // GROUP)[None, :] * SCALE_K
            scale = scale_value(tl.load(where, mask=live, other=0), SCALE) * common
        tl.store(out + at, (numbers * scale).to(out.dtype.element_ty), mask=live)


@triton.jit
def quotients(x, scale):
    """Returns x / scale as IEEE division rounds it, for float32 x that was 16 bits wide.

    No x may be larger than 448 times its scale, which is positive. An instruction of division has a slow
    path, which costs three times as much. A quotient by the rounded reciprocal, corrected once, has the same
    bits for every mantissa of x and scale. Tiny scales and their numbers are lifted, so that nothing
    underflows.
    """
    lift = tl.where(scale < 2.0**-60, 2.0**100, 1.0)
    # Both factors of `near` are negative, so that zeros keep their signs.
    divisor, negative = scale * lift, x * -lift
    share = tl.div_rn(-1.0 + 0.0 * divisor, divisor)
    near = negative * share
    return tl.fma(tl.fma(near, divisor, negative), share, near)


@triton.jit
def saturated(x):
    """Clamps x [..], float32, to the largest magnitude of e4m3; NaN stays NaN."""
    low = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def round_row(x, codes, scales, COLUMNS, BLOCK: tl.constexpr):
    """Program: rounds one row of x [T, COLUMNS] to e4m3 codes and its scale."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    there = c < COLUMNS
    values = tl.load(x + row * COLUMNS + c, mask=there, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 0) / 448.0
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + row, scale)
    shares = quotients(values, scale)
    tl.store(codes + row * COLUMNS + c, saturated(shares).to(codes.dtype.element_ty), mask=there)


@triton.jit
def round_by(x, codes, scale, COUNT, BLOCK: tl.constexpr):
    """Program: rounds BLOCK of the COUNT numbers of x to e4m3 codes by one scale, float32 [1]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < COUNT
    values = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    shares = tl.div_rn(values, tl.load(scale))
    tl.store(codes + at, saturated(shares).to(codes.dtype.element_ty), mask=there)


@triton.jit
def round_groups(x, codes, scales, COLUMNS, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Program (row, GROUPS groups): rounds each GROUP numbers of x [T, COLUMNS] to e4m3 codes and a scale.

    scales: [T, COLUMNS / GROUP].
    """
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    count = COLUMNS // GROUP
    at = row * COLUMNS + g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = g < count
    values = tl.load(x + at, mask=there[:, None], other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 1) / 448.0
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + row * count + g, scale, mask=there)
    shares = quotients(values, scale[:, None])
    tl.store(codes + at, saturated(shares).to(codes.dtype.element_ty), mask=there[:, None])


@triton.jit
def product_of_blocks(
    x, x_scales, weight, scales, bias, out, tokens, N, COLUMNS, SCALE_N,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Program (128 rows of the weight, TOKENS rows of x): e4m3 times e4m3 in blocks of 128 x 128.

    x: codes [tokens, COLUMNS]; x_scales: [tokens, COLUMNS / 128]. weight: codes [N, COLUMNS]; scales: [ceil(N
    / 128), COLUMNS / 128] with rows SCALE_N apart. Sums over a block of columns are scaled in float32.
    """
    stripe = tl.program_id(0)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    there = t < tokens
    n = stripe * 128 + tl.arange(0, 128)
    inside = n < N
    k = tl.arange(0, 128)
    x_at = x + tl.where(there, t, 0).to(tl.int64)[:, None] * COLUMNS + k[None, :]
    w_at = weight + tl.where(inside, n, 0).to(tl.int64)[None, :] * COLUMNS + k[:, None]
    s_at = x_scales + tl.where(there, t, 0).to(tl.int64) * (COLUMNS // 128)
    acc = tl.zeros((TOKENS, 128), tl.float32)
    for s in tl.range(0, COLUMNS // 128, num_stages=STAGES):
        a = tl.load(x_at + s * 128)
        b = tl.load(w_at + s * 128)
        factor = tl.load(s_at + s) * tl.load(scales + stripe * SCALE_N + s)
        acc += tl.dot(a, b) * factor[:, None]
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = out + t[:, None].to(tl.int64) * N + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=("tokens",))
def copied_product_of_blocks(
    x, x_scales, weight, scales, out, tokens, N, COLUMNS, TOKENS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Program (128 rows of the weight, TOKENS rows of x): as `product_of_blocks`, without a bias.

    x, weight: descriptors of codes, which the tensor memory accelerator copies.
    """
    stripe = tl.program_id(0)
    start = tl.program_id(1) * TOKENS
    steps = COLUMNS // 128
    t = start + tl.arange(0, TOKENS)
    there = t < tokens
    own_at = x_scales + tl.where(there, t, 0).to(tl.int64) * steps
    acc = tl.zeros((TOKENS, 128), tl.float32)
    for s in tl.range(0, steps, num_stages=STAGES):
        factor = tl.load(own_at + s) * tl.load(scales + stripe * steps + s)
        found = tl.dot(x.load([start, s * 128]), weight.load([stripe * 128, s * 128]).T)
        acc += found * factor[:, None]
    n = stripe * 128 + tl.arange(0, 128)
    to = out + t[:, None].to(tl.int64) * N + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=there[:, None] & (n < N)[None, :])
