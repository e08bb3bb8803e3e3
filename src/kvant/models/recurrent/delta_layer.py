"""A gated delta net or KDA between its matrix products, for one token of each sequence, in one launch.

The kernel convolves q, k and v, normalises q and k, computes the gates, applies the delta rule, and
normalises and gates the result. It reads and writes the state once. `mixers.GatedDeltaNet` and
`mixers.KimiDelta` define the results.

A program handles a key head and all heads that it serves: another program must not read the convolution's
stored inputs of q and k while this one overwrites them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.kernels.triton.device import launches_ahead, multiprocessors
from kvant.models.recurrent.kernels import softplus
from kvant.models.recurrent.stored import Stored, load_state, store_state

SIZE = 4
"""Taps of a convolution's kernel."""

_MOST = 128 * 128
"""Maximum number of elements of a head's state in a program's registers."""

_TILE, _STAGES = 32, 4
"""Values in a tile of the state, where a program does not hold a whole head, and tiles in flight."""

_CROWD = 15
"""Programs for each multiprocessor from which on tiles are copied ahead."""


def fits(state: Stored, kernel: int) -> bool:
    """Whether `delta_layer` takes states of this shape and a convolution with this many taps."""
    _, values, keys = state.shape
    return kernel == SIZE and triton.next_power_of_2(values) * triton.next_power_of_2(keys) <= _MOST


def is_crowd(programs: int, processors: int) -> bool:
    """Whether tiles are copied ahead. On an H200 that takes less from 128 sequences of 16 key heads on."""
    return programs >= _CROWD * processors


def delta_layer(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv_weight: Tensor, conv_bias: Tensor | None,
    a_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, eps: float, conv: Tensor, state: Stored,
    rows: Tensor, starts: Tensor, key_heads: int, *, strongest: float, by_key: bool = False,
) -> Tensor:  # fmt: skip
    """Runs one token of each of n sequences. Returns [n, heads * values] in qkv's dtype.

    qkv: [n, channels], z: [n, heads * values], a, b: [n, heads], rows of any stride. conv_weight: [channels,
    4], contiguous. conv_bias: [channels] or None. a_log, dt_bias: [heads]. norm_weight: [values]. conv:
    [num_rows, 3, channels], rows of any stride, and state: [num_rows, heads, values, keys] as stored; both
    are updated in place. rows: [n] int64. starts: [n] int32, tokens before this one; a state whose start is
    not positive is not read. strongest: as in `kernels.delta_step`. by_key: KDA, where a is [n, heads * keys]
    and dt_bias [heads * keys], and a sigmoid gates the result, which is rounded once.
    """
    heads, values, keys = state.shape
    n = len(qkv)
    out = torch.empty(n, heads * values, dtype=qkv.dtype, device=qkv.device)
    wide = triton.next_power_of_2(values)
    ahead = launches_ahead(qkv.device)
    given = (
        qkv, qkv.stride(0), z, z.stride(0), a, a.stride(0), b, b.stride(0), conv_weight, conv_bias,
        a_log, dt_bias, norm_weight, eps, conv, conv.stride(0), *state.arguments, rows, starts, out,
        keys**-0.5, strongest,
    )  # fmt: skip
    constants = {
        **state.constants, "PER_KEY": heads // key_heads, "WIDE_KEYS": triton.next_power_of_2(keys),
        "WIDE": wide, "AHEAD": ahead, "BY_KEY": by_key, **({"launch_pdl": True} if ahead else {}),
    }  # fmt: skip
    programs, processors = n * key_heads, multiprocessors(qkv.device)
    if is_crowd(programs, processors):
        # Programs of one sequence run side by side.
        _delta_tiles[(key_heads, n)](
            *given, *qkv.new_empty(2, n, heads * values), **constants,
            MANY=triton.next_power_of_2(heads // key_heads), BLOCK=min(_TILE, wide), STAGES=_STAGES,
            num_warps=4,
        )  # fmt: skip
    else:
        # A whole head at a time waits least; small tiles allow more programs, which fill the bandwidth.
        is_few = programs <= processors
        block = wide if is_few else min(_TILE, wide)
        _delta_layer[(n, key_heads)](*given, **constants, BLOCK=block, num_warps=8 if is_few else 4)
    return out


@triton.jit
def history(kept, channels, c, old):
    """Loads the last three inputs of channels c as float32, oldest first; zeros where not `old`."""
    first = tl.load(kept + c, mask=old, other=0.0).to(tl.float32)
    second = tl.load(kept + channels + c, mask=old, other=0.0).to(tl.float32)
    third = tl.load(kept + 2 * channels + c, mask=old, other=0.0).to(tl.float32)
    return first, second, third


@triton.jit
def convolved(first, second, third, newest, weight, bias, c, there, dtype: tl.constexpr):
    """Returns silu of the convolution of channels c, rounded to dtype, as float32."""
    at = weight + c * 4
    total = first * tl.load(at, mask=there, other=0.0).to(tl.float32)
    total += second * tl.load(at + 1, mask=there, other=0.0).to(tl.float32)
    total += third * tl.load(at + 2, mask=there, other=0.0).to(tl.float32)
    total += newest * tl.load(at + 3, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32)


@triton.jit
def keep(kept, channels, c, there, second, third, newest):
    """Stores the last three inputs, once every thread has read the previous ones."""
    stored: tl.constexpr = kept.dtype.element_ty
    tl.store(kept + c, second.to(stored), mask=there)
    tl.store(kept + channels + c, third.to(stored), mask=there)
    tl.store(kept + 2 * channels + c, newest.to(stored), mask=there)


@triton.jit
def _finished(o, gate, weight, eps, WIDTH: tl.constexpr, BY_KEY: tl.constexpr, dtype: tl.constexpr):
    """Normalises and gates a row o, float32, zero in its padding; rounds where modules round."""
    o = o * tl.rsqrt(tl.sum(o * o, 0) / WIDTH + eps)
    if BY_KEY:
        o = o * weight / (1.0 + tl.exp(-gate))
    else:
        o = (o.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        o = o * (gate / (1.0 + tl.exp(-gate)))
    return o.to(dtype)


@triton.jit
def _decay_of_keys(a, a_log, dt_bias, head, kk, KEYS: tl.constexpr):
    """Returns the decay [1, WIDE_KEYS] of KDA's head. a: the token's gates."""
    of_keys = head * KEYS + kk
    is_key = kk < KEYS
    gate = tl.load(a + of_keys, mask=is_key, other=0.0).to(tl.float32)
    if a_log is not None:
        gate = softplus(gate + tl.load(dt_bias + of_keys, mask=is_key, other=0.0).to(tl.float32))
        gate = -tl.exp(tl.load(a_log + head).to(tl.float32)) * gate
    return tl.exp(gate)[None, :]


@triton.jit(do_not_specialize=("strongest",))
def _delta_layer(qkv, qkv_stride, z, z_stride, a, a_stride, b, b_stride, conv_weight, conv_bias,
                 a_log, dt_bias, norm_weight, eps, conv, conv_stride, words, codes, scales, bits,
                 state_stride, scale_stride, rows, starts, out, scale, strongest,
                 HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
                 WIDE_KEYS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
                 FORMAT: tl.constexpr, PTX: tl.constexpr, BY_KEY: tl.constexpr):  # fmt: skip
    """Program: one key head of one sequence. BLOCK: values in a tile of the state.

    AHEAD: starts while the previous kernel runs, which writes no state, and loads a first head.
    """
    if AHEAD:
        gdc_launch_dependents()
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = HEADS // PER_KEY * KEYS
    channels: tl.constexpr = 2 * width + HEADS * VALUES
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    row = tl.load(rows + i)
    is_old = tl.load(starts + i) > 0
    kk = tl.arange(0, WIDE_KEYS)
    is_key = kk < KEYS
    kept = conv + row * conv_stride
    q_c = j * KEYS + kk
    k_c = q_c + width
    old_key = kk < tl.where(is_old, KEYS, 0)
    q1, q2, q3 = history(kept, channels, q_c, old_key)
    k1, k2, k3 = history(kept, channels, k_c, old_key)
    head = j * PER_KEY
    vv = tl.arange(0, BLOCK)
    old = tl.where(is_old, VALUES, 0)
    s = tl.zeros((BLOCK, WIDE_KEYS), tl.float32)
    if BLOCK == WIDE:
        s = load_state(words, scales, state_stride, scale_stride, row, head * VALUES + vv, vv < old, FORMAT,
                       KEYS, WIDE_KEYS, BLOCK, PTX)  # fmt: skip
    if AHEAD:
        gdc_wait()
    line = qkv + i * qkv_stride
    q4 = tl.load(line + q_c, mask=is_key, other=0.0).to(tl.float32)
    k4 = tl.load(line + k_c, mask=is_key, other=0.0).to(tl.float32)
    q = convolved(q1, q2, q3, q4, conv_weight, conv_bias, q_c, is_key, dtype)
    k = convolved(k1, k2, k3, k4, conv_weight, conv_bias, k_c, is_key, dtype)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    for h in tl.static_range(PER_KEY):
        if BY_KEY:
            decay = _decay_of_keys(a + i * a_stride, a_log, dt_bias, head + h, kk, KEYS)
        else:
            gate = tl.load(a + i * a_stride + head + h).to(tl.float32)
            gate = softplus(gate + tl.load(dt_bias + head + h).to(tl.float32))
            decay = tl.exp(-tl.exp(tl.load(a_log + head + h).to(tl.float32)) * gate)
        beta = strongest / (1.0 + tl.exp(-tl.load(b + i * b_stride + head + h).to(tl.float32)))
        to = out + (i * HEADS + head + h) * VALUES
        from_z = z + i * z_stride + (head + h) * VALUES
        for first in range(0, WIDE, BLOCK):
            inside = first + vv < VALUES
            r = (head + h) * VALUES + first + vv
            if h > 0 or BLOCK != WIDE:
                s = load_state(words, scales, state_stride, scale_stride, row, r, first + vv < old, FORMAT,
                               KEYS, WIDE_KEYS, BLOCK, PTX)  # fmt: skip
            v_c = 2 * width + (head + h) * VALUES + first + vv
            v1, v2, v3 = history(kept, channels, v_c, first + vv < old)
            v4 = tl.load(line + v_c, mask=inside, other=0.0).to(tl.float32)
            v = convolved(v1, v2, v3, v4, conv_weight, conv_bias, v_c, inside, dtype)
            now = s * decay
            u = beta * (v - tl.sum(now * k[None, :], 1))
            now += u[:, None] * k[None, :]
            o = tl.sum(now * q[None, :], 1).to(dtype)
            store_state(now, codes, bits, state_stride, scale_stride, row, r, inside, FORMAT, KEYS, WIDE_KEYS,
                        BLOCK, PTX)  # fmt: skip
            tl.debug_barrier()
            keep(kept, channels, v_c, inside, v2, v3, v4)
            if BLOCK == WIDE:
                weight = tl.load(norm_weight + vv, mask=inside, other=0.0).to(tl.float32)
                gate_z = tl.load(from_z + vv, mask=inside, other=0.0).to(tl.float32)
                o = _finished(o.to(tl.float32), gate_z, weight, eps, VALUES, BY_KEY, dtype)
            tl.store(to + first + vv, o, mask=inside)
        if BLOCK != WIDE:
            tl.debug_barrier()  # other threads stored the head's tiles
            cc = tl.arange(0, WIDE)
            there = cc < VALUES
            whole = tl.load(to + cc, mask=there, other=0.0).to(tl.float32)
            weight = tl.load(norm_weight + cc, mask=there, other=0.0).to(tl.float32)
            gate_z = tl.load(from_z + cc, mask=there, other=0.0).to(tl.float32)
            done = _finished(whole, gate_z, weight, eps, VALUES, BY_KEY, dtype)
            tl.debug_barrier()
            tl.store(to + cc, done, mask=there)
    keep(kept, channels, q_c, is_key, q2, q3, q4)
    keep(kept, channels, k_c, is_key, k2, k3, k4)


@triton.jit(do_not_specialize=("strongest",))
def _delta_tiles(qkv, qkv_stride, z, z_stride, a, a_stride, b, b_stride, conv_weight, conv_bias,
                 a_log, dt_bias, norm_weight, eps, conv, conv_stride, words, codes, scales, bits,
                 state_stride, scale_stride, rows, starts, out, scale, strongest, spare_v, spare_o,
                 HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
                 WIDE_KEYS: tl.constexpr, WIDE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
                 STAGES: tl.constexpr, AHEAD: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr,
                 BY_KEY: tl.constexpr):  # fmt: skip
    """Program: one key head of one sequence; STAGES tiles of BLOCK values of the state are in flight.

    All tiles of all its heads are one loop, without a barrier. spare_v, spare_o: [n, HEADS * VALUES], values
    after the convolution and results before the norm. MANY: PER_KEY, rounded up to a power of two.
    """
    if AHEAD:
        gdc_launch_dependents()
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = HEADS // PER_KEY * KEYS
    channels: tl.constexpr = 2 * width + HEADS * VALUES
    TILES: tl.constexpr = WIDE // BLOCK
    i = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0)
    row = tl.load(rows + i)
    is_old = tl.load(starts + i) > 0
    kk = tl.arange(0, WIDE_KEYS)
    is_key = kk < KEYS
    kept = conv + row * conv_stride
    q_c = j * KEYS + kk
    k_c = q_c + width
    old_key = kk < tl.where(is_old, KEYS, 0)
    head = j * PER_KEY
    vv = tl.arange(0, BLOCK)
    old = tl.where(is_old, VALUES, 0)
    q1, q2, q3 = history(kept, channels, q_c, old_key)
    k1, k2, k3 = history(kept, channels, k_c, old_key)
    if AHEAD:
        gdc_wait()
    line = qkv + i * qkv_stride
    q4 = tl.load(line + q_c, mask=is_key, other=0.0).to(tl.float32)
    k4 = tl.load(line + k_c, mask=is_key, other=0.0).to(tl.float32)
    hh = tl.arange(0, MANY)
    is_head = hh < PER_KEY
    if not BY_KEY:
        gate = tl.load(a + i * a_stride + head + hh, mask=is_head, other=0.0).to(tl.float32)
        gate = softplus(gate + tl.load(dt_bias + head + hh, mask=is_head, other=0.0).to(tl.float32))
        rate = tl.exp(tl.load(a_log + head + hh, mask=is_head, other=0.0).to(tl.float32))
        decays = tl.exp(-rate * gate)
    strength = tl.load(b + i * b_stride + head + hh, mask=is_head, other=0.0).to(tl.float32)
    betas = strongest / (1.0 + tl.exp(-strength))
    q = convolved(q1, q2, q3, q4, conv_weight, conv_bias, q_c, is_key, dtype)
    k = convolved(k1, k2, k3, k4, conv_weight, conv_bias, k_c, is_key, dtype)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    cc = tl.arange(0, WIDE)
    there = cc < VALUES
    for h in tl.static_range(PER_KEY):
        v_c = 2 * width + (head + h) * VALUES + cc
        v1, v2, v3 = history(kept, channels, v_c, cc < old)
        v4 = tl.load(line + v_c, mask=there, other=0.0).to(tl.float32)
        v = convolved(v1, v2, v3, v4, conv_weight, conv_bias, v_c, there, dtype)
        tl.store(spare_v + (i * HEADS + head + h) * VALUES + cc, v.to(dtype), mask=there)
        tl.debug_barrier()
        keep(kept, channels, v_c, there, v2, v3, v4)
    keep(kept, channels, q_c, is_key, q2, q3, q4)
    keep(kept, channels, k_c, is_key, k2, k3, k4)
    for t in tl.range(0, PER_KEY * TILES, num_stages=STAGES):
        first = t % TILES * BLOCK
        r = head * VALUES + t // TILES * VALUES + first + vv
        inside = first + vv < VALUES
        value = tl.load(spare_v + i * HEADS * VALUES + r, mask=inside, other=0.0).to(tl.float32)
        s = load_state(words, scales, state_stride, scale_stride, row, r, first + vv < old, FORMAT, KEYS,
                       WIDE_KEYS, BLOCK, PTX)  # fmt: skip
        if BY_KEY:
            decay = _decay_of_keys(a + i * a_stride, a_log, dt_bias, head + t // TILES, kk, KEYS)
        else:
            decay = tl.sum(tl.where(hh == t // TILES, decays, 0.0), 0)
        now = s * decay
        beta = tl.sum(tl.where(hh == t // TILES, betas, 0.0), 0)
        u = beta * (value - tl.sum(now * k[None, :], 1))
        now += u[:, None] * k[None, :]
        o = tl.sum(now * q[None, :], 1).to(dtype)
        store_state(now, codes, bits, state_stride, scale_stride, row, r, inside, FORMAT, KEYS, WIDE_KEYS,
                    BLOCK, PTX)  # fmt: skip
        tl.store(spare_o + i * HEADS * VALUES + r, o, mask=inside)
    tl.debug_barrier()  # other threads stored the heads' tiles
    for h in tl.static_range(PER_KEY):
        to = (i * HEADS + head + h) * VALUES
        whole = tl.load(spare_o + to + cc, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(norm_weight + cc, mask=there, other=0.0).to(tl.float32)
        from_z = z + i * z_stride + (head + h) * VALUES
        gate_z = tl.load(from_z + cc, mask=there, other=0.0).to(tl.float32)
        done = _finished(whole, gate_z, weight, eps, VALUES, BY_KEY, dtype)
        tl.store(out + to + cc, done, mask=there)
