"""Mamba2 between its two matrix products, for one token of each sequence, in two Triton launches.

The first launch convolves, updates the state and adds the skip. A program handles one head, and the heads of
a group read the same stored inputs of B and C. So only the second launch, with the gated norm, updates those.
`mixers.Mamba2` defines the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvant.models.recurrent.delta_layer import SIZE, convolved, history, keep
from kvant.models.recurrent.kernels import softplus
from kvant.models.recurrent.stored import Stored, load_state, store_state

_CHANNELS = 512


@dataclass(frozen=True, slots=True)
class Finish:
    """The gate and norm after the skip.

    weight: [width], of an RMS norm over `group` numbers; None for no norm. gate_first: the gate multiplies
    before the norm. rounded: the normalised numbers are rounded before the weight multiplies them.
    """

    weight: Tensor | None
    group: int
    eps: float
    gate_first: bool
    rounded: bool


def mamba_layer(
    gate: Tensor, inner: Tensor, dt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, a_log: Tensor,
    dt_bias: Tensor, d: Tensor, conv: Tensor, state: Stored, rows: Tensor, starts: Tensor, groups: int,
    limits: tuple[float, float], finish: Finish,
) -> Tensor:  # fmt: skip
    """Runs one token of each of n sequences. Returns [n, heads * values] in inner's dtype.

    gate: [n, heads * values]; inner: [n, channels], x, B and C; dt: [n, heads]; each with one stride per row.
    conv_weight: [channels, 4], contiguous. conv_bias: [channels] or None. a_log, dt_bias, d: [heads]. conv:
    [num_rows, 3, channels], rows of any stride, and state: [num_rows, heads, values, keys] as stored; both
    are updated in place. rows: [n] int64. starts: [n] int32, tokens before this one; a state whose start is
    not positive is not read. limits: clamp softplus(dt + dt_bias).
    """
    heads, values, keys = state.shape
    n, channels = inner.shape
    out = torch.empty(n, heads * values, dtype=inner.dtype, device=inner.device)
    wide = triton.next_power_of_2(keys)
    block = min(triton.next_power_of_2(values), max(16, 8192 // wide))
    assert conv_weight.shape[1] == SIZE
    _mamba_layer[(n, heads, triton.cdiv(values, block))](
        inner, inner.stride(0), dt, dt.stride(0), conv_weight, conv_bias, a_log, dt_bias, d, conv, conv.stride(0),
        *state.arguments, rows, starts, out, float(limits[0]), min(float(limits[1]), 3e38),
        **state.constants, PER_GROUP=heads // groups, WIDE=wide, BLOCK=block, num_warps=4,
    )  # fmt: skip
    norms = triton.cdiv(heads * values, finish.group)
    _mamba_finish[(n, norms + triton.cdiv(channels, _CHANNELS))](
        out, gate, gate.stride(0), finish.weight, finish.eps, inner, inner.stride(0), conv, conv.stride(0), rows,
        starts, channels, norms, **_constants(finish, heads * values),
    )  # fmt: skip
    return out


def mamba_finish(out: Tensor, gate: Tensor, finish: Finish) -> None:
    """Gates and normalises out [T, width], contiguous, in place. gate: [T, width], rows of one stride."""
    count, width = out.shape
    norms = triton.cdiv(width, finish.group)
    _mamba_finish[(count, norms)](
        out, gate, gate.stride(0), finish.weight, finish.eps, None, 0, None, 0, None, None, 0, norms,
        **_constants(finish, width),
    )  # fmt: skip


def _constants(finish: Finish, width: int) -> dict[str, Any]:
    return {
        "WIDTH": width, "GROUP": finish.group, "WIDE": triton.next_power_of_2(finish.group),
        "GATE_FIRST": finish.gate_first, "ROUNDED": finish.rounded, "BLOCK": _CHANNELS, "num_warps": 8,
    }  # fmt: skip


@triton.jit(do_not_specialize=("least", "most"))
def _mamba_layer(inner, inner_stride, dt, dt_stride, conv_weight, conv_bias, a_log, dt_bias, d, conv, conv_stride,
                 words, codes, scales, bits, state_stride, scale_stride, rows, starts, out, least, most,
                 HEADS: tl.constexpr, PER_GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
                 WIDE: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
                 PTX: tl.constexpr):  # fmt: skip
    """Program: BLOCK values of one head of one sequence."""
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = HEADS * VALUES
    channels: tl.constexpr = width + 2 * (HEADS // PER_GROUP) * KEYS
    i = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    kk = tl.arange(0, WIDE)
    vv = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_key, is_value = kk < KEYS, vv < VALUES
    row = tl.load(rows + i)
    is_old = tl.load(starts + i) > 0
    old_key, old_value = kk < tl.where(is_old, KEYS, 0), vv < tl.where(is_old, VALUES, 0)
    r = h * VALUES + vv
    s = load_state(words, scales, state_stride, scale_stride, row, r, old_value, FORMAT, KEYS, WIDE, BLOCK,
                   PTX)  # fmt: skip
    kept = conv + row * conv_stride
    line = inner + i * inner_stride
    b_c = width + h // PER_GROUP * KEYS + kk
    c_c = b_c + HEADS // PER_GROUP * KEYS
    x1, x2, x3 = history(kept, channels, r, old_value)
    b1, b2, b3 = history(kept, channels, b_c, old_key)
    c1, c2, c3 = history(kept, channels, c_c, old_key)
    x4 = tl.load(line + r, mask=is_value, other=0.0).to(tl.float32)
    b4 = tl.load(line + b_c, mask=is_key, other=0.0).to(tl.float32)
    c4 = tl.load(line + c_c, mask=is_key, other=0.0).to(tl.float32)
    x = convolved(x1, x2, x3, x4, conv_weight, conv_bias, r, is_value, dtype)
    b = convolved(b1, b2, b3, b4, conv_weight, conv_bias, b_c, is_key, dtype)
    c = convolved(c1, c2, c3, c4, conv_weight, conv_bias, c_c, is_key, dtype)
    step = tl.load(dt + i * dt_stride + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step), least), most)
    s = s * tl.exp(-tl.exp(tl.load(a_log + h).to(tl.float32)) * step)
    s += (step * x)[:, None] * b[None, :]
    o = tl.sum(s * c[None, :], 1) + tl.load(d + h).to(tl.float32) * x
    store_state(s, codes, bits, state_stride, scale_stride, row, r, is_value, FORMAT, KEYS, WIDE, BLOCK,
                PTX)  # fmt: skip
    tl.store(out + i * width + r, o.to(dtype), mask=is_value)


@triton.jit
def _mamba_finish(out, gate, gate_stride, weight, eps, inner, inner_stride, conv, conv_stride, rows, starts, channels,
                  norms, WIDTH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, GATE_FIRST: tl.constexpr,
                  ROUNDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program: one sequence, and either one group of its norm or BLOCK channels of the stored inputs."""
    dtype: tl.constexpr = out.dtype.element_ty
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    if j < norms:
        at = j * GROUP + tl.arange(0, WIDE)
        there = (tl.arange(0, WIDE) < GROUP) & (at < WIDTH)
        x = tl.load(out + i * WIDTH + at, mask=there, other=0.0).to(tl.float32)
        z = tl.load(gate + i * gate_stride + at, mask=there, other=0.0).to(tl.float32)
        z = z / (1.0 + tl.exp(-z))
        if weight is None:
            x = x * z.to(dtype).to(tl.float32)
        else:
            if GATE_FIRST:
                x = x * z
            x = x * tl.rsqrt(tl.sum(x * x, 0) / GROUP + eps)
            if ROUNDED:
                x = x.to(dtype).to(tl.float32)
            x = x * tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
            if not GATE_FIRST:
                x = x * z
        tl.store(out + i * WIDTH + at, x.to(dtype), mask=there)
    elif conv is not None:
        c = (j - norms) * BLOCK + tl.arange(0, BLOCK)
        inside = c < channels
        old = c < tl.where(tl.load(starts + i) > 0, channels, 0)
        kept = conv + tl.load(rows + i) * conv_stride
        _, second, third = history(kept, channels, c, old)
        newest = tl.load(inner + i * inner_stride + c, mask=inside, other=0.0).to(tl.float32)
        keep(kept, channels, c, inside, second, third, newest)
