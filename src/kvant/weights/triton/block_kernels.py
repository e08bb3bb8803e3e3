"""Products with weights in GGUF's blocks whose numbers have offsets, or scales within superblocks.

Codes lie in runs of 32 inputs: byte j of a run has input j in its low half, and input j + 16 in its high
half. 6-bit codes have their upper 2 bits after all low halves, in 8 bytes per run: byte j has the bits of
inputs j, j + 8, j + 16 and j + 24. Numbers are decoded in float32 as the codec does. `block_product` then
rounds them to the dtype of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

Q4_1 = tl.constexpr(0)  # float16 scale and offset per 32 inputs
Q4_K = tl.constexpr(1)  # 6-bit scale and offset per 32 inputs, float16 factors of both per 256
Q6_K = tl.constexpr(2)  # int8 scale per 16 inputs, float16 factor per 256


@triton.jit
def _number(code):
    """Returns codes 0..63 as float32, exactly: the lowest bits of 2^23 + code."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _each16(values):
    """Repeats each value of [ROWS, RUNS] 16 times: [ROWS, RUNS * 16]."""
    wide = tl.broadcast_to(values[:, :, None], (values.shape[0], values.shape[1], 16))
    return tl.reshape(wide, (values.shape[0], values.shape[1] * 16))


@triton.jit
def _numbers(
    weight, scales, offsets, factors, n, inside, s, hi, COLUMNS, SCALE_K, FACTOR_K, FACTOR_O,
    KIND: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Decodes rows n [ROWS], int64, of a weight, in RUNS runs from column s, which end before hi.

    Returns the numbers of low and of high halves, float32 [ROWS, RUNS * 16]. Outside the weight they are any
    finite numbers.
    """
    j = tl.arange(0, RUNS * 16)
    runs = s // 32 + tl.arange(0, RUNS)
    live = inside[:, None] & (j < (hi - s) // 2)[None, :]
    there = inside[:, None] & (runs * 32 < hi)[None, :]
    if KIND == Q6_K:
        row_at = weight + n[:, None] * (COLUMNS // 4 * 3)
    else:
        row_at = weight + n[:, None] * (COLUMNS // 2)
    codes = tl.load(row_at + (s // 2 + j)[None, :], mask=live, other=0)
    low, high = codes & 15, codes >> 4
    if KIND == Q4_1:
        at = n[:, None] + runs[None, :] * SCALE_K
        g = _each16(tl.load(scales + at, mask=there, other=0.0).to(tl.float32))
        o = _each16(tl.load(offsets + at, mask=there, other=0.0).to(tl.float32))
        return _number(low) * g + o, _number(high) * g + o
    else:
        factor_at = factors + n[:, None] + (runs // 8)[None, :] * FACTOR_K
        d = tl.load(factor_at, mask=there, other=0.0).to(tl.float32)
        if KIND == Q4_K:
            at = n[:, None] + runs[None, :] * SCALE_K
            m = tl.load(factor_at + FACTOR_O, mask=there, other=0.0).to(tl.float32)
            g = _each16(tl.load(scales + at, mask=there, other=0).to(tl.float32) * d)
            o = _each16(tl.load(offsets + at, mask=there, other=0).to(tl.float32) * m)
            return _number(low) * g - o, _number(high) * g - o
        else:
            upper_at = row_at + COLUMNS // 2 + (s // 4 + j // 16 * 8 + j % 8)[None, :]
            upper = tl.load(upper_at, mask=live, other=0).to(tl.int32) >> (j % 16 // 8 * 2)[None, :]
            low = low.to(tl.int32) | ((upper & 3) << 4)
            high = high.to(tl.int32) | ((upper >> 4 & 3) << 4)
            at = scales + n[:, None] + (2 * runs)[None, :] * SCALE_K
            g = _each16(tl.load(at, mask=there, other=0).to(tl.float32) * d)
            h = _each16(tl.load(at + SCALE_K, mask=there, other=0).to(tl.float32) * d)
            return (_number(low) - 32.0) * g, (_number(high) - 32.0) * h


@triton.jit
def _columns(s, RUNS: tl.constexpr):
    """Returns the columns of low halves in RUNS runs from s; those of high halves are 16 further."""
    j = tl.arange(0, RUNS * 16)
    return s + j // 16 * 32 + j % 16


@triton.jit(do_not_specialize=("tokens", "split"))
def block_product(
    x, weight, scales, offsets, factors, bias, out, partial, arrived, tokens, split, N, COLUMNS, SCALE_K,
    FACTOR_K, FACTOR_O, KIND: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Program (a tile of tokens, a stripe of ROWS rows of the weight, one of `split` parts of its columns).

    x: [tokens, COLUMNS]. weight, scales, offsets, factors: as in `NarrowWeight`; groups of scales lie SCALE_K
    apart, superblocks of factors FACTOR_K, factors of offsets FACTOR_O after those of scales. Other names: as
    in `kernels.product`.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    stripe = tl.program_id(1)
    part = tl.program_id(2)
    r = tl.arange(0, ROWS)
    n = stripe * ROWS + r
    inside = n < N
    wide = n.to(tl.int64)
    t = tile * TOKENS + tl.arange(0, TOKENS)
    there = t < tokens
    RUNS: tl.constexpr = DEPTH // 32
    steps = (COLUMNS + DEPTH - 1) // DEPTH
    span = (steps + split - 1) // split * DEPTH
    lo = part * span
    hi = tl.minimum(lo + span, COLUMNS)
    x_at = x + t[None, :].to(tl.int64) * COLUMNS
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for s in tl.range(lo, hi, DEPTH, num_stages=STAGES):
        low, high = _numbers(
            weight, scales, offsets, factors, wide, inside, s, hi, COLUMNS, SCALE_K, FACTOR_K,
            FACTOR_O, KIND, RUNS,
        )  # fmt: skip
        k = _columns(s, RUNS)
        known = there[None, :] & (k < hi)[:, None]
        a = tl.load(x_at + k[:, None], mask=known, other=0.0)
        b = tl.load(x_at + (k + 16)[:, None], mask=known, other=0.0)
        acc = tl.dot(low.to(dtype), a, acc)
        acc = tl.dot(high.to(dtype), b, acc)
    if not PARTS:
        _store(acc, n, inside, t, there, bias, out, N, BIAS)
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
            _store(total, n, inside, t, there, bias, out, N, BIAS)
            tl.store(arrived + place, 0)


@triton.jit
def _store(acc, n, inside, t, there, bias, out, N, BIAS: tl.constexpr):
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = t[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit
def block_vector(
    x, weight, scales, offsets, factors, bias, out, N, COLUMNS, SCALE_K, FACTOR_K, FACTOR_O,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows of the weight times one row x [COLUMNS], BLOCK columns at a time."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < N
    wide = n.to(tl.int64)
    RUNS: tl.constexpr = BLOCK // 32
    total = tl.zeros((ROWS, BLOCK // 2), tl.float32)
    for s in range(0, COLUMNS, BLOCK):
        low, high = _numbers(
            weight, scales, offsets, factors, wide, inside, s, COLUMNS, COLUMNS, SCALE_K, FACTOR_K,
            FACTOR_O, KIND, RUNS,
        )  # fmt: skip
        k = _columns(s, RUNS)
        a = tl.load(x + k, mask=k < COLUMNS, other=0.0).to(tl.float32)
        b = tl.load(x + k + 16, mask=k < COLUMNS, other=0.0).to(tl.float32)
        total += low * a[None, :] + high * b[None, :]
    acc = tl.sum(total, 1)
    if BIAS:
        acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + n, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def decode_blocks(
    rows, weight, scales, offsets, factors, out, N, COLUMNS, SCALE_K, FACTOR_K, FACTOR_O,
    KIND: tl.constexpr, PICKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (ROWS rows of out, BLOCK columns): decodes numbers of a weight, rounded once to out's dtype.

    out: [N, COLUMNS]. PICKED: row n of out is row rows[n] of the weight.
    """
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = at < N
    wide = at.to(tl.int64)
    n = wide
    if PICKED:
        n = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    s = tl.program_id(1) * BLOCK
    RUNS: tl.constexpr = BLOCK // 32
    low, high = _numbers(
        weight, scales, offsets, factors, n, inside, s, COLUMNS, COLUMNS, SCALE_K, FACTOR_K, FACTOR_O,
        KIND, RUNS,
    )  # fmt: skip
    k = _columns(s, RUNS)
    to = out + wide[:, None] * COLUMNS + k[None, :]
    known = inside[:, None] & (k < COLUMNS)[None, :]
    tl.store(to, low.to(out.dtype.element_ty), mask=known)
    tl.store(to + 16, high.to(out.dtype.element_ty), mask=known)
