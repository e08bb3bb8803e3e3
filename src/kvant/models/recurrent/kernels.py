"""Triton kernels of recurrent layers. One launch per layer for the convolution, one for the recurrence.

They compute in float32 and read and write the states of a step's rows in place. A sequence whose `starts` is
not positive is new: its state is not read. Rows of states may have any stride. `conv` and `scan` define
the results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.kernels.triton.device import multiprocessors, shared_memory_of_a_program
from kvant.models.recurrent.packed import Chunks
from kvant.models.recurrent.stored import Stored, load_state, store_state

_CHANNELS = 512

_TOKENS, _MANY_CHANNELS, _FEW_CHANNELS = 8, 1024, 256
"""Tokens and channels of a program where several tokens of a sequence are convolved. Fewer channels at a time
where it reads stored inputs."""

_FEW_VALUES, _MANY_VALUES = 32, 128
"""Values of a program that passes states over chunks. Small programs fill a device with few sequences."""


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Tensor, starts: Tensor,
    *, silu: bool,
) -> Tensor:  # fmt: skip
    """Runs one token of each sequence through a causal convolution, as `conv.causal_conv` defines it.

    x: [n, channels], rows of any stride. weight: [channels, kernel], contiguous. bias: [channels] or None.
    state: [num_rows, kernel - 1, channels], updated in place. rows: [n] int64. starts: [n] int32, tokens
    before this one. silu: apply x * sigmoid(x). Returns [n, channels] in x's dtype.
    """
    count, channels = x.shape
    out = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    grid = (count, triton.cdiv(channels, _CHANNELS))
    _conv_step[grid](
        x, x.stride(0), weight, bias, state, state.stride(0), rows, starts, out, channels,
        SIZE=weight.shape[1], SILU=silu, BLOCK=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


def short_conv(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: Tensor,
    starts: Tensor,
) -> Tensor:
    """Runs one token of each sequence through a gated convolution: c * conv(b * x). Returns [n, channels].

    projected: [n, 3 * channels], b, c and x, rows of any stride. Other arguments: as in `conv_step`.
    """
    count, channels = len(projected), weight.shape[0]
    out = torch.empty(count, channels, dtype=projected.dtype, device=projected.device)
    _short_conv[(count, triton.cdiv(channels, _CHANNELS))](
        projected, projected.stride(0), weight, bias, state, state.stride(0), rows, starts, out, channels,
        SIZE=weight.shape[1], BLOCK=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


def conv_prompts(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: Tensor, starts: Tensor,
    owners: Tensor, cu_seqlens: Tensor, *, silu: bool, stored: bool = False,
) -> Tensor:  # fmt: skip
    """Implements `conv_step` for sequences of any length. x: [T, channels]. Returns [T, channels].

    owners: [T] int32, each token's sequence. cu_seqlens: [n + 1] int32. stored: a token reads earlier inputs
    as the state stores them, so results do not depend on how a sequence is cut into steps.
    """
    count, channels = x.shape
    out = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    common = (x, x.stride(0), weight, bias, state, state.stride(0), rows, starts)
    # Programs of the same tokens run side by side, and read whole rows.
    _conv_prompts[(triton.cdiv(channels, _MANY_CHANNELS) * triton.cdiv(count, _TOKENS),)](
        *common, owners, cu_seqlens, out, count, channels,
        SIZE=weight.shape[1], SILU=silu, STORED=stored, TOKENS=_TOKENS, BLOCK=_MANY_CHANNELS,
        PART=_FEW_CHANNELS, num_warps=4,
    )  # fmt: skip
    _keep_last[(len(rows), triton.cdiv(channels, _CHANNELS))](
        x, x.stride(0), state, state.stride(0), rows, starts, cu_seqlens, channels,
        SIZE=weight.shape[1], BLOCK=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return out


def delta_step(
    mixed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Stored,
    rows: Tensor, starts: Tensor, key_heads: int, *, strongest: float,
    singles: Tensor | None = None, out: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs the gated delta rule, with its gates, for one token of each sequence, or more with cu_seqlens.

    mixed: [n, channels], q, k and v after the convolution. a, b: [n, heads], rows of any stride: decay
    e^(-exp(a_log) softplus(a + dt_bias)), strength `strongest` * sigmoid(b). a_log, dt_bias: [heads]. state:
    [num_rows, heads, values, keys] as stored, updated in place. rows: [n] int64. starts: [n] int32. singles:
    [2, k] int64, the sequences to run and their tokens in mixed; only these tokens are written to out.
    cu_seqlens: [n + 1] int32, offsets of the sequences' tokens. They run one after the other, and the state
    is rounded after each, so results do not depend on where a sequence is cut; mixed, a and b then have T
    rows. Returns [rows of mixed, heads, values] in mixed's dtype, or out.
    """
    heads, values, keys = state.shape
    if out is None:
        out = torch.empty(len(mixed), heads, values, dtype=mixed.dtype, device=mixed.device)
    count = len(rows) if singles is None else singles.shape[1]
    # Programs of one state run side by side.
    _delta_step[(triton.cdiv(values, _tile(values, cu_seqlens)), heads, count)](
        mixed, mixed.stride(0), a, a.stride(0), b, b.stride(0), a_log, dt_bias, *state.arguments,
        rows, starts, out, keys**-0.5, strongest, singles, count, cu_seqlens,
        **state.constants, **_tiling(state, cu_seqlens, warps=2), PER_KEY=heads // key_heads,
    )  # fmt: skip
    return out


def mamba_step(
    mixed: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, state: Stored, rows: Tensor,
    starts: Tensor, groups: int, limits: tuple[float, float], cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs Mamba2 for one token of each sequence, or more with cu_seqlens, with the skip by d.

    mixed: [n, channels], x, B and C after the convolution. dt: [n, heads], rows of any stride. a_log,
    dt_bias, d: [heads]. limits: clamp softplus(dt + dt_bias). state: [num_rows, heads, values, keys] as
    stored, updated in place. rows: [n] int64. starts: [n] int32. cu_seqlens: as in `delta_step`. Returns
    [rows of mixed, heads, values] in mixed's dtype.
    """
    heads, values, _ = state.shape
    out = torch.empty(len(mixed), heads, values, dtype=mixed.dtype, device=mixed.device)
    _mamba_step[(len(rows), heads, triton.cdiv(values, _tile(values, cu_seqlens)))](
        mixed, mixed.stride(0), dt, dt.stride(0), a_log, dt_bias, d, *state.arguments,
        rows, starts, out, float(limits[0]), min(float(limits[1]), 3e38), cu_seqlens,
        **state.constants, **_tiling(state, cu_seqlens, warps=4), PER_GROUP=heads // groups,
    )  # fmt: skip
    return out


def _tile(values: int, cu_seqlens: Tensor | None) -> int:
    """Returns the values per program: few if it loops over many tokens, so that no warp waits for another."""
    return min(32 if cu_seqlens is None else 8, triton.next_power_of_2(values))


def _tiling(state: Stored, cu_seqlens: Tensor | None, *, warps: int) -> dict[str, Any]:
    """Returns constants of the one-token kernels. With cu_seqlens they do not depend on the step.

    warps: of a program without cu_seqlens.
    """
    _, values, keys = state.shape
    return {
        "WIDE": triton.next_power_of_2(keys),
        "BLOCK": _tile(values, cu_seqlens),
        "STORED": cu_seqlens is not None and state.codes.dtype is not torch.float32,
        "num_warps": warps if cu_seqlens is None else 1,
    }


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, alike: bool = False
) -> Tensor:
    """Returns the RMS norm of rows times silu(gate), rounded as transformers' gated norms of Qwen round.

    x: [n, width], contiguous. gate: [m, n / m * width], rows of any stride. weight: [width].
    alike: a row's sum is added in one order for any n. Returns [n, width] in x's dtype.
    """
    count, width = x.shape
    out = torch.empty_like(x)
    together = 16 if count >= 4096 and not alike else 1  # single rows fill the device sooner
    _gated_norm[(triton.cdiv(count, together),)](
        x, gate, gate.stride(0), weight, out, eps, count,
        EACH=count // len(gate), WIDTH=width, WIDE=triton.next_power_of_2(width), ROWS=together,
        num_warps=4 if together > 1 else 1,
    )  # fmt: skip
    return out


def over_chunks(
    q: Tensor, k: Tensor, v: Tensor, moved: Tensor | None, scores: Tensor, whole: Tensor, state: Stored,
    rows: Tensor, starts: Tensor, chunks: Chunks, out: Tensor, *, precision: str = "tf32x3",
) -> None:  # fmt: skip
    """Passes states from chunk to chunk as `scan` does, for all sequences in one launch.

    q, k, moved: [chunks, heads, size, keys]; scores: [chunks, heads, size, size]; all float32 or all
    float16. v: float32 [chunks, heads, size, values]. All are contiguous. whole: [chunks, heads] float32,
    decays of whole chunks. state: [num_rows, heads, values, keys] as stored, updated in place. rows: [n]
    int64. starts: [n] int32. out: [T, heads, values]; only tokens in chunks are written. precision: of the
    products.
    """
    heads, values, keys = state.shape
    size = q.shape[2]
    wide = max(16, triton.next_power_of_2(keys))
    block, stages = _passage(heads * len(chunks.places), values, wide, q)
    # Programs of one head run side by side, and read its chunks from memory once.
    _over_chunks[(triton.cdiv(values, block), heads, len(rows))](
        q, k, v, moved, scores, whole, *state.arguments, rows, starts, chunks.bounds, chunks.pieces, out,
        len(rows), len(whole),
        **state.constants, SIZE=size, WIDE=wide,
        BLOCK=block, DELTA=moved is not None, STAGES=stages, PRECISION=precision,
        num_warps=8 if block == 128 else 4, num_stages=1,
    )  # fmt: skip


def _passage(heads: int, values: int, wide: int, q: Tensor) -> tuple[int, int]:
    """Returns values of a program that passes states over chunks, and chunks in flight.

    heads: of all sequences together. wide: keys. q: [.., size, keys], a chunk's queries.
    """
    fewest = min(_FEW_VALUES, max(16, triton.next_power_of_2(values)))
    if q.dtype is not torch.float16:
        return fewest, 1
    size, stages = q.shape[2], 2
    most = min(_MANY_VALUES, max(16, triton.next_power_of_2(values)))
    for block in (most, fewest) if heads >= multiprocessors(q.device) else (fewest,):
        held = stages * size * (6 * wide + 2 * size + 4 * block)  # q, k and moved; scores; v
        if held + 1024 <= shared_memory_of_a_program(q.device):
            return block, stages
    return fewest, 1


@triton.jit
def _activated(x, SILU: tl.constexpr):
    if SILU:
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def shrunk(x, dtype: tl.constexpr):
    """Returns x [.., ..], float32, for a product in dtype, and what to multiply the product by.

    Scaled to at most 1,024 for float16, so that no number is too large for it.
    """
    factor = 1.0
    if dtype == tl.float16:
        largest = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-30)
        factor = largest * (1.0 / 1024.0)
        x = x * (1024.0 / largest)
    return x.to(dtype), factor


@triton.jit
def _conv_step(x, x_stride, weight, bias, state, state_stride, rows, starts, out, channels,
               SIZE: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program: BLOCK channels of one sequence."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < channels
    old = c < tl.where(tl.load(starts + i) > 0, channels, 0)
    kept = state + tl.load(rows + i) * state_stride + c
    newest = tl.load(x + i * x_stride + c, mask=there, other=0.0).to(tl.float32)
    total = newest * tl.load(weight + c * SIZE + SIZE - 1, mask=there, other=0.0).to(tl.float32)
    for j in tl.static_range(SIZE - 1):
        h = tl.load(kept + j * channels, mask=old, other=0.0).to(tl.float32)
        total += h * tl.load(weight + c * SIZE + j, mask=there, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(kept + (j - 1) * channels, h.to(state.dtype.element_ty), mask=there)
    tl.store(kept + (SIZE - 2) * channels, newest.to(state.dtype.element_ty), mask=there)
    if bias is not None:
        total += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    found = _activated(total, SILU)
    tl.store(out + i * channels + c, found.to(out.dtype.element_ty), mask=there)


@triton.jit
def _short_conv(projected, stride, weight, bias, state, state_stride, rows, starts, out, channels, SIZE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Program: BLOCK channels of one sequence. Rounds products where modules round them."""
    dtype: tl.constexpr = out.dtype.element_ty
    i = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < channels
    old = c < tl.where(tl.load(starts + i) > 0, channels, 0)
    kept = state + tl.load(rows + i) * state_stride + c
    line = projected + i * stride + c
    b = tl.load(line, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(line + channels, mask=there, other=0.0).to(tl.float32)
    x = tl.load(line + 2 * channels, mask=there, other=0.0).to(tl.float32)
    newest = (b * x).to(dtype).to(tl.float32)
    total = newest * tl.load(weight + c * SIZE + SIZE - 1, mask=there, other=0.0).to(tl.float32)
    for j in tl.static_range(SIZE - 1):
        h = tl.load(kept + j * channels, mask=old, other=0.0).to(tl.float32)
        total += h * tl.load(weight + c * SIZE + j, mask=there, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(kept + (j - 1) * channels, h.to(state.dtype.element_ty), mask=there)
    tl.store(kept + (SIZE - 2) * channels, newest.to(state.dtype.element_ty), mask=there)
    if bias is not None:
        total += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    found = gate * total.to(dtype).to(tl.float32)
    tl.store(out + i * channels + c, found.to(dtype), mask=there)


@triton.jit
def _taps(weight, c, channels, SIZE: tl.constexpr):
    """Returns a tuple of the SIZE taps of channels c, float32."""
    taps = ()
    if SIZE == 4:  # side by side in memory: one wide load instead of four that skip
        at = (c * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
        all_taps = tl.load(weight + at, mask=(c < channels)[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(all_taps, (c.shape[0], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        taps = (first, second, third, fourth)
    else:
        for j in tl.static_range(SIZE):
            tap = tl.load(weight + c * SIZE + j, mask=c < channels, other=0.0).to(tl.float32)
            taps = taps + (tap,)  # noqa: RUF005 - Triton unpacks no tuples
    return taps


@triton.jit
def _conv_inside(x, x_stride, weight, bias, out, token, c, channels, stored: tl.constexpr, SIZE: tl.constexpr,
                 SILU: tl.constexpr, STORED: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Convolves channels c of TOKENS tokens from `token` on, whose earlier inputs are all in x.

    Each input is read once.
    """
    there = c < channels
    line = x + (token - (SIZE - 1)) * x_stride + c
    inputs = ()
    for j in tl.static_range(TOKENS + SIZE - 1):
        found = tl.load(line + j * x_stride, mask=there, other=0.0)
        inputs = inputs + (found,)  # noqa: RUF005 - Triton unpacks no tuples
    taps = _taps(weight, c, channels, SIZE)
    for k in tl.static_range(TOKENS):
        total = tl.zeros([c.shape[0]], tl.float32)
        for j in tl.static_range(SIZE):
            h = inputs[k + j].to(tl.float32)
            if STORED and j < SIZE - 1:
                h = h.to(stored).to(tl.float32)
            total += h * taps[j]
        if bias is not None:
            total += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
        found = _activated(total, SILU).to(out.dtype.element_ty)
        tl.store(out + (token + k) * channels + c, found, mask=there)


@triton.jit
def _conv_edge(x, x_stride, weight, bias, out, t, first, is_token, is_near, kept, c, channels,
               stored: tl.constexpr, SIZE: tl.constexpr, SILU: tl.constexpr,
               STORED: tl.constexpr):  # fmt: skip
    """Convolves channels c of tokens t. Some of them, `is_near`, need the stored inputs `kept`."""
    is_channel = (c < channels)[None, :]
    total = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    for j in tl.static_range(SIZE):
        at = t - (SIZE - 1) + j
        inside = (is_token & (at >= first))[:, None] & is_channel
        h = tl.load(x + at[:, None] * x_stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
        if STORED and j < SIZE - 1:
            h = h.to(stored).to(tl.float32)
        old = (is_near & (at < first))[:, None] & is_channel
        before = kept + (at - first + SIZE - 1)[:, None] * channels + c[None, :]
        h += tl.load(before, mask=old, other=0.0).to(tl.float32)
        tap = tl.load(weight + c * SIZE + j, mask=c < channels, other=0.0).to(tl.float32)
        total += h * tap[None, :]
    if bias is not None:
        total += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    found = _activated(total, SILU).to(out.dtype.element_ty)
    tl.store(out + t[:, None] * channels + c[None, :], found, mask=is_token[:, None] & is_channel)


@triton.jit(do_not_specialize=("count",))
def _conv_prompts(x, x_stride, weight, bias, state, state_stride, rows, starts, owners, cu_seqlens, out, count,
                  channels, SIZE: tl.constexpr, SILU: tl.constexpr, STORED: tl.constexpr, TOKENS: tl.constexpr,
                  BLOCK: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Program: BLOCK channels of TOKENS tokens; PART channels at a time near the begin of a sequence."""
    parts = tl.cdiv(channels, BLOCK)
    token = (tl.program_id(0) // parts).to(tl.int64) * TOKENS
    channel = tl.program_id(0) % parts * BLOCK
    t = token + tl.arange(0, TOKENS)
    is_token = t < count
    i = tl.load(owners + t, mask=is_token, other=0)
    first = tl.load(cu_seqlens + i)
    is_edge = (t - first < SIZE - 1) | (t >= count)
    stored: tl.constexpr = state.dtype.element_ty
    if tl.max(is_edge.to(tl.int32), 0) == 0:
        c = channel + tl.arange(0, BLOCK)
        _conv_inside(x, x_stride, weight, bias, out, token, c, channels, stored, SIZE, SILU, STORED,
                     TOKENS)  # fmt: skip
    else:
        is_near = is_token & is_edge & (tl.load(starts + i) > 0)
        kept = state + tl.load(rows + i)[:, None] * state_stride
        for part in range(0, BLOCK, PART):
            c = channel + part + tl.arange(0, PART)
            _conv_edge(x, x_stride, weight, bias, out, t, first, is_token, is_near, kept, c, channels,
                       stored, SIZE, SILU, STORED)  # fmt: skip


@triton.jit
def _keep_last(x, x_stride, state, state_stride, rows, starts, cu_seqlens, channels,
               SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program: BLOCK channels of one sequence. Reads all inputs that move before it overwrites any."""
    i = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < channels
    first = tl.load(cu_seqlens + i).to(tl.int64)
    end = tl.load(cu_seqlens + i + 1).to(tl.int64)
    if end > first:
        start = tl.load(starts + i)
        kept = state + tl.load(rows + i) * state_stride + c
        for j in tl.static_range(SIZE - 1):
            at = end - (SIZE - 1) + j
            inside = c < tl.where(at >= first, channels, 0)
            h = tl.load(x + at * x_stride + c, mask=inside, other=0.0).to(tl.float32)
            old = c < tl.where((start > 0) & (at < first), channels, 0)
            before = tl.load(kept + (at - first + SIZE - 1) * channels, mask=old, other=0.0)
            h += before.to(tl.float32)
            tl.store(kept + j * channels, h.to(state.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=("strongest", "count"))
def _delta_step(mixed, mixed_stride, a, a_stride, b, b_stride, a_log, dt_bias, words, codes, scales, bits,
                state_stride, scale_stride, rows, starts, out, scale, strongest, singles, count, cu_seqlens,
                HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
                WIDE: tl.constexpr, BLOCK: tl.constexpr, STORED: tl.constexpr, FORMAT: tl.constexpr,
                PTX: tl.constexpr):  # fmt: skip
    """Program: BLOCK values of one head of one sequence."""
    first = tl.program_id(2).to(tl.int64)
    place = first
    if singles is not None:
        place = tl.load(singles + first)
        first = tl.load(singles + count + first)
    end = first + 1
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + place).to(tl.int64)
        end = tl.load(cu_seqlens + place + 1).to(tl.int64)
    h = tl.program_id(1)
    kk = tl.arange(0, WIDE)
    vv = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = kk < KEYS, vv < VALUES
    old = vv < tl.where(tl.load(starts + place) > 0, VALUES, 0)
    page = tl.load(rows + place)
    r = h * VALUES + vv
    s = load_state(
        words, scales, state_stride, scale_stride, page, r, old, FORMAT, KEYS, WIDE, BLOCK, PTX
    )
    width = HEADS // PER_KEY * KEYS
    for i in range(first, end):
        line = mixed + i * mixed_stride
        q = tl.load(line + h // PER_KEY * KEYS + kk, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(line + width + h // PER_KEY * KEYS + kk, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(line + 2 * width + h * VALUES + vv, mask=is_value, other=0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        gate = tl.load(a + i * a_stride + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
        decay = tl.exp(-tl.exp(tl.load(a_log + h).to(tl.float32)) * softplus(gate))
        beta = strongest / (1.0 + tl.exp(-tl.load(b + i * b_stride + h).to(tl.float32)))
        s = s * decay
        u = beta * (v - tl.sum(s * k[None, :], 1))
        s += u[:, None] * k[None, :]
        o = tl.sum(s * q[None, :], 1)
        tl.store(out + (i * HEADS + h) * VALUES + vv, o.to(out.dtype.element_ty), mask=is_value)
        if STORED:
            store_state(s, codes, bits, state_stride, scale_stride, page, r, is_value, FORMAT, KEYS, WIDE,
                        BLOCK, PTX)  # fmt: skip
            tl.debug_barrier()
            s = load_state(words, scales, state_stride, scale_stride, page, r, is_value, FORMAT, KEYS, WIDE,
                           BLOCK, PTX)  # fmt: skip
            tl.debug_barrier()
    if not STORED:
        there = vv < tl.where(end > first, VALUES, 0)
        store_state(s, codes, bits, state_stride, scale_stride, page, r, there, FORMAT, KEYS, WIDE, BLOCK,
                    PTX)  # fmt: skip


@triton.jit(do_not_specialize=("least", "most"))
def _mamba_step(mixed, mixed_stride, dt, dt_stride, a_log, dt_bias, d, words, codes, scales, bits, state_stride,
                scale_stride, rows, starts, out, least, most, cu_seqlens, HEADS: tl.constexpr,
                PER_GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, WIDE: tl.constexpr,
                BLOCK: tl.constexpr, STORED: tl.constexpr, FORMAT: tl.constexpr,
                PTX: tl.constexpr):  # fmt: skip
    """Program: BLOCK values of one head of one sequence."""
    first = tl.program_id(0).to(tl.int64)
    place, end = first, first + 1
    if cu_seqlens is not None:
        first = tl.load(cu_seqlens + place).to(tl.int64)
        end = tl.load(cu_seqlens + place + 1).to(tl.int64)
    h = tl.program_id(1)
    kk = tl.arange(0, WIDE)
    vv = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = kk < KEYS, vv < VALUES
    old = vv < tl.where(tl.load(starts + place) > 0, VALUES, 0)
    page = tl.load(rows + place)
    r = h * VALUES + vv
    s = load_state(
        words, scales, state_stride, scale_stride, page, r, old, FORMAT, KEYS, WIDE, BLOCK, PTX
    )
    inner = HEADS * VALUES
    for i in range(first, end):
        line = mixed + i * mixed_stride
        x = tl.load(line + h * VALUES + vv, mask=is_value, other=0.0).to(tl.float32)
        k = tl.load(line + inner + h // PER_GROUP * KEYS + kk, mask=is_key, other=0.0)
        k = k.to(tl.float32)
        other = line + inner + HEADS // PER_GROUP * KEYS
        q = tl.load(other + h // PER_GROUP * KEYS + kk, mask=is_key, other=0.0).to(tl.float32)
        step = tl.load(dt + i * dt_stride + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(step), least), most)
        s = s * tl.exp(-tl.exp(tl.load(a_log + h).to(tl.float32)) * step)
        s += (step * x)[:, None] * k[None, :]
        o = tl.sum(s * q[None, :], 1) + tl.load(d + h).to(tl.float32) * x
        tl.store(out + (i * HEADS + h) * VALUES + vv, o.to(out.dtype.element_ty), mask=is_value)
        if STORED:
            store_state(s, codes, bits, state_stride, scale_stride, page, r, is_value, FORMAT, KEYS, WIDE,
                        BLOCK, PTX)  # fmt: skip
            tl.debug_barrier()
            s = load_state(words, scales, state_stride, scale_stride, page, r, is_value, FORMAT, KEYS, WIDE,
                           BLOCK, PTX)  # fmt: skip
            tl.debug_barrier()
    if not STORED:
        there = vv < tl.where(end > first, VALUES, 0)
        store_state(s, codes, bits, state_stride, scale_stride, page, r, there, FORMAT, KEYS, WIDE, BLOCK,
                    PTX)  # fmt: skip


@triton.jit(do_not_specialize=("count",))
def _gated_norm(x, gate, gate_stride, weight, out, eps, count, EACH: tl.constexpr, WIDTH: tl.constexpr,
                WIDE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Program: ROWS rows."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDE)
    there = (i < count)[:, None] & (c < WIDTH)[None, :]
    at = i[:, None] * WIDTH + c[None, :]
    row = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    row = row * tl.rsqrt(tl.sum(row * row, 1) / WIDTH + eps)[:, None]
    row = row.to(out.dtype.element_ty).to(tl.float32)
    row = row * tl.load(weight + c, mask=c < WIDTH, other=0.0).to(tl.float32)[None, :]
    row = row.to(out.dtype.element_ty).to(tl.float32)
    z_at = (i // EACH * gate_stride + i % EACH * WIDTH)[:, None] + c[None, :]
    z = tl.load(gate + z_at, mask=there, other=0.0).to(tl.float32)
    row = row * (z / (1.0 + tl.exp(-z)))
    tl.store(out + at, row.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=("count", "num_chunks"))
def _over_chunks(q, k, v, moved, scores, whole, words, codes, scales, bits, state_stride, scale_stride,
                 rows, starts, bounds, pieces, out, count, num_chunks, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr,
                 WIDE: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr, STAGES: tl.constexpr,
                 PRECISION: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr):  # fmt: skip
    """Program: BLOCK values of one head of one sequence, chunk after chunk.

    It holds the state as [keys, values]. STAGES: chunks in flight.
    """
    held: tl.constexpr = q.dtype.element_ty
    i = tl.program_id(2)
    h = tl.program_id(1)
    kk = tl.arange(0, WIDE)
    vv = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tt = tl.arange(0, SIZE)
    is_key, is_value = kk < KEYS, vv < VALUES
    first, end = tl.load(bounds + i), tl.load(bounds + count + i)
    if end > first:
        old = vv < tl.where(tl.load(starts + i) > 0, VALUES, 0)
        page = tl.load(rows + i)
        r = h * VALUES + vv
        s = tl.trans(load_state(words, scales, state_stride, scale_stride, page, r, old, FORMAT, KEYS, WIDE,
                                BLOCK, PTX))  # fmt: skip
        of_keys = tt[:, None] * KEYS + kk[None, :]
        of_values = tt[:, None] * VALUES + vv[None, :]
        for n in tl.range(first, end, num_stages=STAGES):
            at = (n * HEADS + h) * SIZE
            new = tl.load(v + at * VALUES + of_values, mask=is_value[None, :], other=0.0)
            decay = tl.load(whole + n * HEADS + h)
            token = tl.load(pieces + n) + tt
            there = (tt < tl.load(pieces + num_chunks + n))[:, None] & is_value[None, :]
            before, factor = shrunk(s, held)
            if DELTA:
                m = tl.load(moved + at * KEYS + of_keys, mask=is_key[None, :], other=0.0)
                new -= tl.dot(m, before, input_precision=PRECISION) * factor
            qs = tl.load(q + at * KEYS + of_keys, mask=is_key[None, :], other=0.0)
            o = tl.dot(qs, before, input_precision=PRECISION) * factor
            new, factor = shrunk(new, held)
            near = tl.load(scores + at * SIZE + tt[:, None] * SIZE + tt[None, :])
            o += tl.dot(near, new, input_precision=PRECISION) * factor
            to = out + (token[:, None] * HEADS + h) * VALUES + vv[None, :]
            tl.store(to, o.to(out.dtype.element_ty), mask=there)
            ks = tl.load(k + at * KEYS + of_keys, mask=is_key[None, :], other=0.0)
            s = s * decay + tl.dot(tl.trans(ks), new, input_precision=PRECISION) * factor
        store_state(tl.trans(s), codes, bits, state_stride, scale_stride, page, r, is_value, FORMAT, KEYS, WIDE,
                    BLOCK, PTX)  # fmt: skip
