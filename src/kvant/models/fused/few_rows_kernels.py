"""Matrix products of few rows, fused with the norms, sums and activations between them.

A decoder layer's norm is (x * w) * s with one number s per row, and a product is linear. So the previous
product stores x * w and sums of squares of its columns, and the next product multiplies its results by s.
No launch is needed for a norm, a residual sum or an activation.

Weights are the first operand, because their rows fill a matrix instruction and few tokens do not. They are
read once. If a weight has too few rows to fill the device, several programs share a stripe of it, each with
a part of the columns. The program that ends last adds the parts in order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.models.fused.triton_kernels import activated

SCALED = tl.constexpr(0)  # out = x w^T * scale + bias
GATED = tl.constexpr(1)  # out = activation(gate) * up of this; weight: all gates, then all ups
ADDED = tl.constexpr(2)  # out = residual + (x w^T + bias); x of the next product, and its squares


@triton.jit
def _scale_of(squares, stripes, token, there, eps, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Returns 1 / sqrt(mean of squares + eps) of tokens from partial sums of squares, [stripes, 64]."""
    STEP: tl.constexpr = 16
    s = tl.arange(0, STEP)
    total = tl.zeros((STEP, TOKENS), tl.float32)
    for first in range(0, stripes, STEP):
        at = squares + (first + s)[:, None] * 64 + token[None, :]
        total += tl.load(at, mask=(first + s < stripes)[:, None] & there[None, :], other=0.0)
    return tl.rsqrt(tl.sum(total, 0) / WIDTH + eps)


@triton.jit
def _finish(
    acc, stripe, n, inside, t, there, token, bias, squares, stripes, eps, residual, norm_weight,
    out, weighted, out_squares, N,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, READY: tl.constexpr, ONE: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Applies what follows the sums acc [ROWS, TOKENS] of weight rows n; rounds where modules round."""
    if KIND == ADDED:
        at = t[None, :].to(tl.int64) * N + n[:, None]
        mask = inside[:, None] & there[None, :]
        old = tl.load(residual + at, mask=mask, other=0.0)
        w = tl.load(norm_weight + n, mask=inside, other=0.0).to(tl.float32) + ONE
        if BIAS:
            acc += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        total = (acc.to(dtype).to(tl.float32) + old.to(tl.float32)).to(dtype)
        tl.store(out + at, total, mask=mask)
        wide = total.to(tl.float32)
        tl.store(weighted + at, (wide * w[:, None]).to(dtype), mask=mask)
        tl.store(out_squares + stripe * 64 + t, tl.sum(wide * wide, 0), mask=there)
    else:
        y = acc
        if not READY:
            y *= _scale_of(squares, stripes, token, there, eps, COLUMNS, TOKENS)[None, :]
        if BIAS:
            y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        y = y.to(dtype)
        if KIND == GATED:
            HALF: tl.constexpr = ROWS // 2
            gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, TOKENS)), (1, 2, 0)))
            y = (activated(gate.to(tl.float32), ACTIVATION, dtype) * up.to(tl.float32)).to(dtype)
            width = N // 2
            m = stripe * HALF + tl.arange(0, HALF)
            at = t[None, :].to(tl.int64) * width + m[:, None]
            tl.store(out + at, y, mask=(m < width)[:, None] & there[None, :])
        else:
            at = t[None, :].to(tl.int64) * N + n[:, None]
            tl.store(out + at, y.to(out.dtype.element_ty), mask=inside[:, None] & there[None, :])


@triton.jit(do_not_specialize=("tokens", "stripes"))
def product(
    x, weight, bias, picked, squares, stripes, eps, residual, norm_weight,
    out, weighted, out_squares, partial, arrived, tokens, N,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    PICKED: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, READY: tl.constexpr,
    ONE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: one stripe of ROWS rows of the weight, and one of SPLIT parts of its columns.

    x: [T, COLUMNS]. PICKED: picked, int64 [tokens], says which rows of x; else they are the first `tokens`.
    weight: [N, COLUMNS]. squares, out_squares: float32 [stripes, 64]. residual, weighted: [tokens, N].
    partial: float32 [stripes, SPLIT, ROWS, TOKENS], scratch. arrived: int32 [stripes], zeros before and
    after. EVEN: every tile lies within the weight. READY: x is normalised already. ONE: added to a norm's
    weight.
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    if AHEAD:
        gdc_launch_dependents()
    stripe = tl.program_id(0)
    part = tl.program_id(1)
    r = tl.arange(0, ROWS)
    if KIND == GATED:
        HALF: tl.constexpr = ROWS // 2
        n = stripe * HALF + r % HALF
        inside = n < N // 2
        n += r // HALF * (N // 2)
    else:
        n = stripe * ROWS + r
        inside = n < N
    t = tl.arange(0, TOKENS)
    there = t < tokens
    token = t.to(tl.int64)
    k = tl.arange(0, DEPTH)
    SPAN: tl.constexpr = (COLUMNS + DEPTH * SPLIT - 1) // (DEPTH * SPLIT) * DEPTH
    lo = part * SPAN
    hi = tl.minimum(lo + SPAN, COLUMNS)
    w_at = weight + n[:, None].to(tl.int64) * COLUMNS + k[None, :]
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    if AHEAD:
        gdc_wait()
    if PICKED:
        token = tl.load(picked + t, mask=there, other=0)
    x_at = x + token[None, :] * COLUMNS + k[:, None]
    for s in tl.range(lo, hi, DEPTH, num_stages=STAGES):
        if EVEN:
            a = tl.load(w_at + s, eviction_policy="evict_first")
            b = tl.load(x_at + s, mask=there[None, :], other=0.0)
        else:
            a = tl.load(w_at + s, mask=inside[:, None] & (s + k < hi)[None, :], other=0.0)
            b = tl.load(x_at + s, mask=there[None, :] & (s + k < hi)[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    if SPLIT == 1:
        _finish(
            acc, stripe, n, inside, t, there, token, bias, squares, stripes, eps, residual,
            norm_weight, out, weighted, out_squares, N, COLUMNS, TOKENS, ROWS, KIND, BIAS, ACTIVATION,
            READY, ONE, dtype,
        )  # fmt: skip
    else:
        at = r[:, None] * TOKENS + t[None, :]
        parts = partial + stripe * (SPLIT * ROWS * TOKENS)
        tl.store(parts + part * (ROWS * TOKENS) + at, acc)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + stripe, 1, sem="acq_rel")
        if before == SPLIT - 1:
            total = tl.zeros((ROWS, TOKENS), tl.float32)
            for i in tl.static_range(SPLIT):
                total += tl.load(parts + i * (ROWS * TOKENS) + at, cache_modifier=".cg")
            _finish(
                total, stripe, n, inside, t, there, token, bias, squares, stripes, eps, residual,
                norm_weight, out, weighted, out_squares, N, COLUMNS, TOKENS, ROWS, KIND, BIAS,
                ACTIVATION, READY, ONE, dtype,
            )  # fmt: skip
            tl.store(arrived + stripe, 0)


@triton.jit
def _add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def _rounded(y, bias, row, BIAS: tl.constexpr, dtype: tl.constexpr):
    if BIAS:
        y += tl.load(bias + row).to(tl.float32)
    return y.to(dtype).to(tl.float32)


@triton.jit
def one_row(
    x, norm_weight, weight, bias, residual, out, picked, eps, N,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    PICKED: tl.constexpr, ACTIVATION: tl.constexpr, ONE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: `product` for a single token, by two rows of the weight; with GATED a gate and its up.

    x: [1, COLUMNS], normalised already for ADDED only. Otherwise every program sums the squares of x beside
    the product, which costs less than waiting for another program. N: even. AHEAD: starts while the previous
    kernel runs, and loads a first block of the weight, which that kernel does not write.
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    if AHEAD:
        gdc_launch_dependents()
    if KIND == GATED:
        row = tl.program_id(0).to(tl.int64)
        other = row + N // 2
    else:
        row = tl.program_id(0).to(tl.int64) * 2
        other = row + 1
    totals = tl.zeros((BLOCK,), tl.float32)
    others = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        if COLUMNS % BLOCK == 0:
            a = tl.load(weight + row * COLUMNS + c, eviction_policy="evict_first")
            b = tl.load(weight + other * COLUMNS + c, eviction_policy="evict_first")
        else:
            a = tl.load(weight + row * COLUMNS + c, mask=c < COLUMNS, other=0.0)
            b = tl.load(weight + other * COLUMNS + c, mask=c < COLUMNS, other=0.0)
        if start == 0:
            if AHEAD:
                gdc_wait()
            if PICKED:
                x += tl.load(picked) * COLUMNS
            if KIND == ADDED:
                old = tl.load(residual + row).to(tl.float32)
                older = tl.load(residual + other).to(tl.float32)
        v = tl.load(x + c, mask=c < COLUMNS, other=0.0).to(tl.float32)
        if KIND != ADDED:
            squares += v * v
            v *= tl.load(norm_weight + c, mask=c < COLUMNS, other=0.0).to(tl.float32) + ONE
        totals += a.to(tl.float32) * v
        others += b.to(tl.float32) * v
    y, z, square = tl.reduce((totals, others, squares), 0, _add_three)
    if KIND == ADDED:
        y = (_rounded(y, bias, row, BIAS, dtype) + old).to(dtype)
        z = (_rounded(z, bias, other, BIAS, dtype) + older).to(dtype)
    else:
        scale = tl.rsqrt(square / COLUMNS + eps)
        y = _rounded(y * scale, bias, row, BIAS, dtype)
        z = _rounded(z * scale, bias, other, BIAS, dtype)
    if KIND == GATED:
        tl.store(out + row, (activated(y, ACTIVATION, dtype) * z).to(dtype))
    else:
        tl.store(out + row, y.to(out.dtype.element_ty))
        tl.store(out + other, z.to(out.dtype.element_ty))


@triton.jit
def ready_row(
    x, weight, bias, out, N,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: multiplies ROWS rows of the weight [N, COLUMNS] by a single normalised row x [1, COLUMNS].

    GATED: ROWS gates and their ups; out [1, N / 2] is activation(gate) * up. AHEAD: as in `one_row`.
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    if AHEAD:
        gdc_launch_dependents()
    width = N // 2 if GATED else N
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < width
    safe = tl.where(inside, n, 0)
    w_at = weight + safe[:, None].to(tl.int64) * COLUMNS
    up_at = w_at + width.to(tl.int64) * COLUMNS
    totals = tl.zeros((ROWS, BLOCK), tl.float32)
    ups = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, COLUMNS, BLOCK):
        c = start + tl.arange(0, BLOCK)
        if start + BLOCK <= COLUMNS:
            a = tl.load(w_at + c[None, :], eviction_policy="evict_first")
            if GATED:
                b = tl.load(up_at + c[None, :], eviction_policy="evict_first")
        else:
            there = (c < COLUMNS)[None, :]
            a = tl.load(w_at + c[None, :], mask=there, other=0.0, eviction_policy="evict_first")
            if GATED:
                b = tl.load(
                    up_at + c[None, :], mask=there, other=0.0, eviction_policy="evict_first"
                )
        if AHEAD and start == 0:
            gdc_wait()
        v = tl.load(x + c, mask=c < COLUMNS, other=0.0).to(tl.float32)[None, :]
        totals += a.to(tl.float32) * v
        if GATED:
            ups += b.to(tl.float32) * v
    y = tl.sum(totals, 1)
    if BIAS:
        y += tl.load(bias + safe).to(tl.float32)
    y = y.to(dtype)
    if GATED:
        z = tl.sum(ups, 1)
        if BIAS:
            z += tl.load(bias + width + safe).to(tl.float32)
        z = z.to(dtype).to(tl.float32)
        y = (activated(y.to(tl.float32), ACTIVATION, dtype) * z).to(dtype)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def embed(
    ids, embedding, norm_weight, residual, weighted, squares,
    WIDTH: tl.constexpr, PAD: tl.constexpr, GATHER: tl.constexpr, TILES: tl.constexpr, ONE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program: one token. residual: its embedding; weighted, squares [1, 64]: inputs of the first norm.

    Without GATHER the residual is an input, and ids and embedding are not read. TILES: of 8 tokens in
    `weighted`, which is `wide_rows.Blocks.data`; 0 if it has rows. AHEAD: as in `one_row`.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PAD)
    mask = c < WIDTH
    if GATHER:
        x = tl.load(embedding + tl.load(ids + token) * WIDTH + c, mask=mask, other=0.0)
        tl.store(residual + token * WIDTH + c, x, mask=mask)
    else:
        x = tl.load(residual + token * WIDTH + c, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    w = tl.load(norm_weight + c, mask=mask, other=0.0).to(tl.float32) + ONE
    stored = (wide * w).to(x.dtype)
    at = token * WIDTH + c
    if TILES:  # the layout of `wide_rows.cu`
        stored = (stored.to(tl.float32) * 18446744073709551616.0).to(x.dtype)  # 2 ** 64
        row = (c // 64 * TILES + token // 8) * 512 + token % 8 * 64
        piece = (c // 8 % 2 * 4 + c % 8 // 4 * 2 + c % 2) ^ (token % 8)
        at = row + piece * 8 + c % 64 // 16 * 2 + c % 4 // 2
    tl.store(weighted + at, stored, mask=mask)
    tl.store(squares + token, tl.sum(wide * wide, 0))
