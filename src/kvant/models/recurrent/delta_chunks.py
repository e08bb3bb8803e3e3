"""The gated delta rule over prompts: two Triton launches for any number of sequences and chunks.

The first launch computes all chunks at once, as far as they do not depend on the state before them. The
second, `kernels.over_chunks`, passes the state from chunk to chunk. `scan` has the formulas and defines the
results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.kernels.triton.device import is_nvidia
from kvant.models.recurrent.kernels import over_chunks, shrunk, softplus
from kvant.models.recurrent.packed import Chunks, Packed
from kvant.models.recurrent.stored import Stored

_PART = tl.constexpr(16)
"""Rows of a triangular system that are solved one after the other."""

_NARROWEST = 32
"""Keys and values are padded to at least this many. With 16 keys Triton 3.6 compiled wrong products for an
H200: values were off by 9 % in float32, and bfloat16 ended in an illegal memory access.
"""

_REGISTERS = 168
"""A thread has at most this many, which lets a multiprocessor of an H200 hold three programs."""


def delta_chunks(
    mixed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Stored, packed: Packed,
    chunks: Chunks, key_heads: int, out: Tensor, *, strongest: float,
) -> None:  # fmt: skip
    """Runs the gated delta rule, with its gates, over the tokens in chunks. Writes `out` and the states.

    mixed: [T, channels], q, k and v after the convolution, in the compute dtype. a, b: [T, heads], rows of
    any stride. a_log, dt_bias, state, strongest: as in `kernels.delta_step`. out: [T, heads, values] in the
    compute dtype; only tokens in chunks are written.
    """
    heads, values, keys = state.shape
    count, size = chunks.pieces.shape[1], chunks.size
    exact = precision(mixed) == "tf32x3"
    # No row of q, k or moved is longer than 2, since keys have length 1 and are taken away with a strength of
    # at most 2. No entry of the system's inverse is larger either. So float16 holds them, with as many bits
    # as a tf32 product reads of a float32 number.
    held = torch.float32 if exact else torch.float16
    q, k, moved = (mixed.new_empty(count, heads, size, keys, dtype=held) for _ in range(3))
    scores = mixed.new_empty(count, heads, size, size, dtype=held)
    v = mixed.new_empty(count, heads, size, values, dtype=torch.float32)
    whole = v.new_empty(count, heads)
    # Programs of one chunk run side by side, and read whole rows of tokens.
    _within_chunks[(heads, count)](
        mixed, mixed.stride(0), a, a.stride(0), b, b.stride(0), a_log, dt_bias, chunks.pieces,
        q, k, v, moved, scores, whole, keys**-0.5, strongest, count,
        HEADS=heads, PER_KEY=heads // key_heads, KEYS=keys, VALUES=values, SIZE=size,
        WIDE_KEYS=max(_NARROWEST, triton.next_power_of_2(keys)),
        WIDE=max(_NARROWEST, triton.next_power_of_2(values)),
        PRECISION=precision(mixed), num_warps=8 if exact else 4, num_stages=1,
        **({"maxnreg": _REGISTERS} if is_nvidia(mixed.device) and not exact else {}),
    )  # fmt: skip
    over_chunks(
        q, k, v, moved, scores, whole, state, packed.rows, packed.starts, chunks, out,
        precision=precision(mixed),
    )  # fmt: skip


def precision(x: Tensor) -> str:
    """Returns a precision for products of float32 numbers that were computed from x [..]."""
    return "tf32x3" if x.dtype is torch.float32 else "tf32"


@triton.jit
def _inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns the inverse of I + lower; lower: [SIZE, SIZE], zero on and above the diagonal.

    Inverts the diagonal blocks row by row. With D these inverses and N the entries left of the blocks, I +
    lower is D^-1 (I + D N), and the fourth power of D N is zero.
    """
    BLOCKS: tl.constexpr = SIZE // _PART
    tl.static_assert(BLOCKS <= 4)
    block, r, t = tl.arange(0, BLOCKS), tl.arange(0, _PART), tl.arange(0, SIZE)
    same = block[:, None, None, None] == block[None, None, :, None]
    apart = tl.reshape(lower, (BLOCKS, _PART, BLOCKS, _PART))
    diagonal = tl.sum(tl.where(same, apart, 0.0), 2)
    solved = tl.where((r[:, None] == r[None, :])[None, :, :], diagonal * 0.0 + 1.0, 0.0)
    for i in range(1, _PART):
        is_row = (r == i)[None, :, None]
        row = tl.sum(tl.where(is_row, diagonal, 0.0), 1)
        taken = tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(is_row, solved - taken[:, None, :], solved)
    inner = tl.reshape(tl.where(same, solved[:, :, None, :], 0.0), (SIZE, SIZE))
    left = tl.where((t // _PART)[:, None] > (t // _PART)[None, :], lower, 0.0)
    once = tl.dot(inner, left, input_precision=PRECISION)
    twice = tl.dot(once, once, input_precision=PRECISION)
    inner += tl.dot(twice, inner, input_precision=PRECISION)
    return inner - tl.dot(once, inner, input_precision=PRECISION)


@triton.jit(do_not_specialize=("strongest", "count"))
def _within_chunks(mixed, mixed_stride, a, a_stride, b, b_stride, a_log, dt_bias, pieces, q_out, k_out, v_out,
                   moved, scores, whole, scale, strongest, count,
                   HEADS: tl.constexpr, PER_KEY: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
                   SIZE: tl.constexpr, WIDE_KEYS: tl.constexpr, WIDE: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Program: one chunk of one head. Rows are loaded where they are used, so that few are held at once.

    pieces: [2, count] int64, first token and number of tokens of each chunk.
    """
    n = tl.program_id(1).to(tl.int64)
    h = tl.program_id(0)
    first = tl.load(pieces + n)
    length = tl.load(pieces + count + n)
    t, kk = tl.arange(0, SIZE), tl.arange(0, WIDE_KEYS)
    inside, is_key = t < length, kk < KEYS
    token = first + t
    of_keys = inside[:, None] & is_key[None, :]
    line = mixed + token[:, None] * mixed_stride
    PART: tl.constexpr = min(64, WIDE_KEYS, WIDE)
    width: tl.constexpr = HEADS // PER_KEY * KEYS
    held: tl.constexpr = moved.dtype.element_ty
    at = n * HEADS + h
    gate = tl.load(a + token * a_stride + h, mask=inside, other=0.0).to(tl.float32)
    gate = softplus(gate + tl.load(dt_bias + h).to(tl.float32))
    gate = tl.where(inside, -tl.exp(tl.load(a_log + h).to(tl.float32)) * gate, 0.0)
    since, total = tl.cumsum(gate, 0), tl.sum(gate, 0)
    beta = tl.load(b + token * b_stride + h, mask=inside, other=0.0).to(tl.float32)
    beta = tl.where(inside, strongest / (1.0 + tl.exp(-beta)), 0.0)
    tl.store(whole + at, tl.exp(total))
    k_at = line + width + h // PER_KEY * KEYS + kk[None, :]
    to = at * SIZE * KEYS + t[:, None] * KEYS + kk[None, :]
    k = tl.load(k_at, mask=of_keys, other=0.0)
    wide = k.to(tl.float32)
    k_scale = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)
    wide = wide * (k_scale * tl.exp(total - since))[:, None]
    tl.store(k_out + to, wide.to(held), mask=is_key[None, :])
    turned = tl.trans(k)
    decay = tl.exp(tl.where(t[:, None] >= t[None, :], since[:, None] - since[None, :], -1e30))
    decay = decay * k_scale[None, :]
    lower = tl.dot(k, turned, input_precision=PRECISION) * decay * (beta * k_scale)[:, None]
    lower = tl.where(t[:, None] > t[None, :], lower, 0.0)
    tl.debug_barrier()  # keeps later loads behind, and so the number of registers low
    q = tl.load(line + h // PER_KEY * KEYS + kk[None, :], mask=of_keys, other=0.0)
    wide = q.to(tl.float32)
    q_scale = tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6) * scale
    wide = wide * (q_scale * tl.exp(since))[:, None]
    tl.store(q_out + to, wide.to(held), mask=is_key[None, :])
    near = tl.dot(q, turned, input_precision=PRECISION) * decay * q_scale[:, None]
    tl.store(scores + at * SIZE * SIZE + t[:, None] * SIZE + t[None, :], near.to(held))
    tl.debug_barrier()
    solved = _inverse(lower, SIZE, PRECISION).to(held)
    for c in tl.static_range(0, WIDE, PART):
        vv = c + tl.arange(0, PART)
        v_at = line + 2 * width + h * VALUES + vv[None, :]
        of_values = inside[:, None] & (vv < VALUES)[None, :]
        v = tl.load(v_at, mask=of_values, other=0.0).to(tl.float32)
        v, factor = shrunk(v * beta[:, None], held)
        v = tl.dot(solved, v, input_precision=PRECISION) * factor
        v_to = at * SIZE * VALUES + t[:, None] * VALUES + vv[None, :]
        tl.store(v_out + v_to, v, mask=(vv < VALUES)[None, :])
        tl.debug_barrier()
    for c in tl.static_range(0, WIDE_KEYS, PART):
        kk = c + tl.arange(0, PART)
        k_at = line + width + h // PER_KEY * KEYS + kk[None, :]
        of_keys = inside[:, None] & (kk < KEYS)[None, :]
        k = tl.load(k_at, mask=of_keys, other=0.0).to(tl.float32) * k_scale[:, None]
        k = (k * (beta * tl.exp(since))[:, None]).to(held)
        m = tl.dot(solved, k, input_precision=PRECISION)
        to = at * SIZE * KEYS + t[:, None] * KEYS + kk[None, :]
        tl.store(moved + to, m.to(held), mask=(kk < KEYS)[None, :])
        tl.debug_barrier()
