"""`Kernels` for GPUs: one launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvant.kernels.triton.device import launches_ahead
from kvant.models.fused.kernels import TorchKernels
from kvant.models.fused.layers import Norm, QKNorms
from kvant.models.fused.recipe import Activation, NormKind, Pairing
from kvant.models.fused.triton_latent import rotate_latent
from kvant.weights.rounding import RoundedRows, Rounding
from kvant.weights.triton.kernels import quotients, saturated

_NONE, _RMS, _RMS_WIDE, _RMS_ONE, _LAYER, _LAYER_ONE = (
    tl.constexpr(i) for i in (-1, 0, 1, 2, 3, 4)
)
_EXACT, _BY_ROW, _BY_GROUP, _BY_SCALE = (tl.constexpr(i) for i in range(4))
"""How a row is rounded to e4m3: not at all, by a scale per row, a scale per GROUP numbers, a given scale."""
_KINDS = {
    NormKind.RMS: _RMS, NormKind.RMS_WIDE: _RMS_WIDE, NormKind.RMS_ONE: _RMS_ONE,
    NormKind.LAYER: _LAYER, NormKind.LAYER_ONE: _LAYER_ONE,
}  # fmt: skip

SILU, GELU, GELU_TANH, RELU, RELU_SQUARED = (tl.constexpr(i) for i in (0, 1, 2, 3, 4))
ACTIVATIONS = {
    Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2, Activation.RELU: 3,
    Activation.RELU_SQUARED: 4,
}  # fmt: skip
"""Numbers of activations, as `activated` takes them."""


class TritonKernels:
    """`Kernels` in float16, bfloat16 and float32 on a GPU. A kernel may start while the previous one runs."""

    def __init__(self, device: torch.device) -> None:
        ahead = launches_ahead(device)
        self._ahead: dict[str, Any] = {"AHEAD": ahead, **({"launch_pdl": True} if ahead else {})}
        self._torch = TorchKernels()

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Implements `Kernels.norm`: x [T, width]."""
        if norm.weight is not None and norm.weight.ndim != 1:
            return self._torch.norm(x, norm)
        out = torch.empty_like(x)
        self._norm(x, x, out, norm, None, 1.0, add=False)
        return out

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm | None,
        *,
        before: Norm | None = None,
        factor: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Implements `Kernels.add_norm`: x, residual [T, width]."""
        self._norm(x, residual, x, norm, before, factor, add=True)
        return (residual if norm is None else x), residual

    def add_norm_rounded(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Norm,
        rounding: Rounding,
        *,
        before: Norm | None = None,
        factor: float = 1.0,
    ) -> tuple[RoundedRows, Tensor]:
        """Implements `Kernels.add_norm_rounded`: x, residual [T, width]."""
        made = rounding.empty(x)
        self._norm(x, residual, x, norm, before, factor, add=True, rounded=(made, rounding))
        return made, residual

    def _norm(
        self,
        x: Tensor,
        residual: Tensor,
        out: Tensor,
        norm: Norm | None,
        before: Norm | None,
        factor: float,
        *,
        add: bool,
        rounded: tuple[RoundedRows, Rounding] | None = None,
    ) -> None:
        width = x.shape[-1]
        rows = x.numel() // width
        if rows == 0:
            return
        _add_norm[(rows,)](
            x, residual, out, *_of(norm), *_of(before), factor, *_places(rounded),
            WIDTH=width, PAD=triton.next_power_of_2(width), ADD=add, FACTOR=factor != 1.0,
            KIND=_kind(norm), BEFORE=_kind(before), **_how(rounded), num_warps=_warps(width),
            **self._ahead,
        )  # fmt: skip

    def rotate(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        norms: QKNorms | None = None,
        pairing: Pairing = Pairing.HALVES,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implements `Kernels.rotate`: qkv [T, (Hq + 2 Hkv) * head_dim]; cos, sin [T, R / 2]."""
        if norms is not None and not norms.of_heads:
            return self._torch.rotate(qkv, cos, sin, num_q_heads, num_kv_heads, norms, pairing)
        tokens = qkv.shape[0]
        heads = qkv.view(tokens, num_q_heads + 2 * num_kv_heads, -1)
        head_dim = heads.shape[-1]
        rotated = num_q_heads + num_kv_heads
        at_once = 4
        q_norm, k_norm = (None, None) if norms is None else (norms.q, norms.k)
        q_weight, k_weight = _of(q_norm)[0], _of(k_norm)[0]
        if tokens and (cos.shape[-1] or norms is not None):
            _rotate[(tokens, triton.cdiv(rotated, at_once))](
                qkv, qkv.stride(0), cos, sin, q_weight, k_weight, _of(q_norm)[2],
                Q_HEADS=num_q_heads, HEADS=rotated, HEAD=head_dim,
                PAD=triton.next_power_of_2(head_dim), ROTARY=2 * cos.shape[-1],
                NEIGHBOURS=pairing is Pairing.NEIGHBOURS, KIND=_kind(q_norm), AT_ONCE=at_once,
                num_warps=1, **self._ahead,
            )  # fmt: skip
        q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
        return q, k, v

    def rotate_latent(
        self, q: Tensor, row: Tensor, norm: Norm, cos: Tensor, sin: Tensor, pairing: Pairing
    ) -> tuple[Tensor, Tensor]:
        """Implements `Kernels.rotate_latent`: q [T, heads, nope + R]; row [T, L + R]; cos, sin [T, R / 2]."""
        if norm.kind is not NormKind.RMS or norm.weight is None:
            return self._torch.rotate_latent(q, row, norm, cos, sin, pairing)
        tokens, heads, head = q.shape
        rotary, at_once = 2 * cos.shape[-1], 16
        latent = row.shape[1] - rotary
        if tokens:
            rotate_latent[(tokens, triton.cdiv(heads, at_once) + 1)](
                q, q.stride(0), row, row.stride(0), norm.weight, norm.eps, cos, sin,
                HEADS=heads, HEAD=head, LATENT=latent, ROTARY=rotary,
                PAD_L=triton.next_power_of_2(latent), PAD=triton.next_power_of_2(rotary // 2),
                NEIGHBOURS=pairing is Pairing.NEIGHBOURS, AT_ONCE=at_once,
                num_warps=4, **self._ahead,
            )  # fmt: skip
        return q, row

    def norm_whole(self, qkv: Tensor, q_width: int, k_width: int, norms: QKNorms) -> Tensor:
        """Implements `Kernels.norm_whole`: qkv [T, ..]."""
        if qkv.shape[0]:
            widest = max(q_width, k_width)
            _norm_whole[(qkv.shape[0], 2)](
                qkv, qkv.stride(0), *_of(norms.q)[:2], *_of(norms.k)[:2], norms.q.eps,
                Q_WIDTH=q_width, K_WIDTH=k_width, PAD=triton.next_power_of_2(widest),
                KIND=_kind(norms.q), num_warps=_warps(widest), **self._ahead,
            )  # fmt: skip
        return qkv

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Implements `Kernels.gate`: gate_up [T, 2 * width]."""
        tokens, both = gate_up.shape
        return self._activate(gate_up, gate_up.new_empty(tokens, both // 2), activation, gated=True)

    def gate_rounded(
        self, gate_up: Tensor, activation: Activation, rounding: Rounding
    ) -> RoundedRows:
        """Implements `Kernels.gate_rounded`: gate_up [T, 2 * width]."""
        out = gate_up[:, : gate_up.shape[1] // 2]  # used for its shape only: nothing is written
        made = rounding.empty(out)
        self._activate(gate_up, out, activation, gated=True, rounded=(made, rounding))
        return made

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """Implements `Kernels.activate`: x [T, width]."""
        return self._activate(x, torch.empty_like(x), activation, gated=False)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Implements `Kernels.sigmoid`: x [..]."""
        return torch.sigmoid(x)

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        """Implements `Kernels.gate_heads`: x [T, heads * head_dim]; gate [T, heads, head_dim]."""
        tokens, heads, width = gate.shape
        if tokens:
            # Programs of one head are the fastest for few tokens. For many, such small programs keep a
            # multiprocessor half empty.
            rows, warps = (1, 1) if tokens * heads <= 1024 else (8, 4)
            _gate_heads[(triton.cdiv(tokens * heads, rows),)](
                x, gate, gate.stride(0), gate.stride(1), tokens * heads, HEADS=heads, WIDTH=width,
                PAD=triton.next_power_of_2(width), ROWS=rows, num_warps=warps, **self._ahead,
            )  # fmt: skip
        return x

    def tanh(self, x: Tensor) -> Tensor:
        """Implements `Kernels.tanh`: x [..]."""
        return torch.tanh(x)

    def _activate(
        self,
        x: Tensor,
        out: Tensor,
        activation: Activation,
        *,
        gated: bool,
        rounded: tuple[RoundedRows, Rounding] | None = None,
    ) -> Tensor:
        tokens, width = out.shape
        # A row's scale needs its largest number, so one program handles the whole row.
        whole = rounded is not None and rounded[1].is_by_row
        block = min(triton.next_power_of_2(width), 2048) if whole else 1024
        if tokens:
            _gate[(tokens, 1 if whole else triton.cdiv(width, block))](
                x, out, *_places(rounded), WIDTH=width, BLOCK=block,
                ACTIVATION=ACTIVATIONS[activation], GATED=gated, **_how(rounded),
                num_warps=8 if block > 1024 else 4, **self._ahead,
            )  # fmt: skip
        return out


def _places(rounded: tuple[RoundedRows, Rounding] | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if rounded is None else (rounded[0].codes, rounded[0].scales)


def _how(rounded: tuple[RoundedRows, Rounding] | None) -> dict[str, int]:
    if rounded is None:
        return {"ROUND": _EXACT.value, "GROUP": 1}
    rounding = rounded[1]
    if rounding.scale is not None:
        return {"ROUND": _BY_SCALE.value, "GROUP": 1}
    if rounding.group:
        return {"ROUND": _BY_GROUP.value, "GROUP": rounding.group}
    return {"ROUND": _BY_ROW.value, "GROUP": 1}


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


def _kind(norm: Norm | None) -> int:
    return int((_NONE if norm is None else _KINDS[norm.kind]).value)


def _of(norm: Norm | None) -> tuple[Tensor | None, Tensor | None, float]:
    return (None, None, 0.0) if norm is None else (norm.weight, norm.bias, norm.eps)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Applies an activation to x, float32; returns float32 numbers that were rounded to dtype."""
    if ACTIVATION == SILU:
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        small = tl.exp(-2.0 * tl.abs(inner))  # a positive exponent could overflow
        tanh = (1.0 - small) / (1.0 + small)
        y = 0.5 * x * (1.0 + tl.where(inner < 0.0, -tanh, tanh))
    elif ACTIVATION == RELU:
        y = tl.where(x < 0.0, 0.0, x)
    else:
        y = tl.where(x < 0.0, 0.0, x)
        y = y * y
    return y.to(dtype).to(tl.float32)


@triton.jit
def _loaded(pointer, at, mask):
    """Loads the numbers of a weight or a bias as float32.

    Callers handle None themselves: Triton 3.6 compiles no function that returns None.
    """
    return tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _normed(x, w, b, mask, width, eps, KIND: tl.constexpr, dtype: tl.constexpr):
    """Normalises a row x, float32 with zeros outside mask; returns float32 numbers rounded to dtype.

    w, b: weight and bias, float32, or None.
    """
    if KIND == _LAYER or KIND == _LAYER_ONE:
        x = tl.where(mask, x - tl.sum(x, 0) / width, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    if KIND == _RMS:
        y = y.to(dtype).to(tl.float32)
    if w is not None:
        if KIND == _RMS_ONE or KIND == _LAYER_ONE:
            y *= w + 1.0
        else:
            y *= w
    if b is not None:
        y += b
    return y.to(dtype).to(tl.float32)


@triton.jit
def _store_rounded(y, codes, scales, row, first, WIDTH: tl.constexpr, PAD: tl.constexpr,
                   ROUND: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Rounds PAD float32 numbers y of a row like `weights.codecs.round_rows`; stores them from column `first`.

    codes: [T, WIDTH] e4m3. scales: [T, 1] by row; [T, WIDTH / GROUP] by group; [1], an input, by scale. y is
    0 outside the row.
    """
    c = first + tl.arange(0, PAD)
    if ROUND == _BY_GROUP:
        GROUPS: tl.constexpr = PAD // GROUP
        count: tl.constexpr = WIDTH // GROUP
        parts = tl.reshape(y, (GROUPS, GROUP))
        scale = tl.max(tl.abs(parts), 1) / 448.0
        scale = tl.where(scale > 0, scale, 1.0)
        g = first // GROUP + tl.arange(0, GROUPS)
        tl.store(scales + row * count + g, scale, mask=g < count)
        shares = quotients(parts, scale[:, None])
        shares = tl.reshape(shares, (PAD,))
    elif ROUND == _BY_ROW:
        scale = tl.max(tl.abs(y), 0) / 448.0
        scale = tl.where(scale > 0, scale, 1.0)
        tl.store(scales + row, scale)
        shares = quotients(y, scale)
    else:
        shares = tl.div_rn(y, tl.load(scales))
    tl.store(codes + row * WIDTH + c, saturated(shares).to(codes.dtype.element_ty), mask=c < WIDTH)


@triton.jit
def _add_norm(x, residual, out, weight, bias, eps, before_weight, before_bias, before_eps, factor,
              codes, scales,
              WIDTH: tl.constexpr, PAD: tl.constexpr, ADD: tl.constexpr, FACTOR: tl.constexpr,
              KIND: tl.constexpr, BEFORE: tl.constexpr, ROUND: tl.constexpr, GROUP: tl.constexpr,
              AHEAD: tl.constexpr):  # fmt: skip
    """Program: one row. Weights, which no kernel writes, are loaded before waiting for the previous kernel.

    The normalised row goes to `out`, or, if it is rounded, to codes and scales: see `_store_rounded`.
    """
    if AHEAD:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * WIDTH
    c = tl.arange(0, PAD)
    mask = c < WIDTH
    w = None if weight is None else _loaded(weight, c, mask)
    b = None if bias is None else _loaded(bias, c, mask)
    before_w = None if before_weight is None else _loaded(before_weight, c, mask)
    before_b = None if before_bias is None else _loaded(before_bias, c, mask)
    if AHEAD:
        gdc_wait()
    raw = tl.load(x + row + c, mask=mask, other=0.0)
    dtype: tl.constexpr = raw.dtype
    value = raw.to(tl.float32)
    if BEFORE != _NONE:
        value = _normed(value, before_w, before_b, mask, WIDTH, before_eps, BEFORE, dtype)
    if FACTOR:
        value = (value * factor).to(dtype).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + c, mask=mask, other=0.0).to(tl.float32)
        total = value.to(dtype)
        tl.store(residual + row + c, total, mask=mask)
        value = total.to(tl.float32)
    if KIND != _NONE:
        y = _normed(value, w, b, mask, WIDTH, eps, KIND, dtype)
        if ROUND == _EXACT:
            tl.store(out + row + c, y.to(dtype), mask=mask)
        else:
            y = tl.where(mask, y, 0.0)
            _store_rounded(
                y, codes, scales, tl.program_id(0).to(tl.int64), 0, WIDTH, PAD, ROUND, GROUP
            )


@triton.jit
def _norm_whole(qkv, stride, q_weight, q_bias, k_weight, k_bias, eps,
                Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, PAD: tl.constexpr,
                KIND: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Program: normalises all queries, or all keys, of one token in place."""
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    at = qkv + tl.program_id(0).to(tl.int64) * stride
    c = tl.arange(0, PAD)
    if tl.program_id(1) == 0:
        mask = c < Q_WIDTH
        raw = tl.load(at + c, mask=mask, other=0.0)
        y = _normed(
            raw.to(tl.float32),
            None if q_weight is None else _loaded(q_weight, c, mask),
            None if q_bias is None else _loaded(q_bias, c, mask),
            mask, Q_WIDTH, eps, KIND, raw.dtype,
        )  # fmt: skip
        tl.store(at + c, y.to(raw.dtype), mask=mask)
    else:
        mask = c < K_WIDTH
        raw = tl.load(at + Q_WIDTH + c, mask=mask, other=0.0)
        y = _normed(
            raw.to(tl.float32),
            None if k_weight is None else _loaded(k_weight, c, mask),
            None if k_bias is None else _loaded(k_bias, c, mask),
            mask, K_WIDTH, eps, KIND, raw.dtype,
        )  # fmt: skip
        tl.store(at + Q_WIDTH + c, y.to(raw.dtype), mask=mask)


@triton.jit
def _head_weight(q_weight, k_weight, at, is_q, inside, KIND: tl.constexpr):
    q = tl.load(q_weight + at, mask=inside, other=0.0)[None, :]
    k = tl.load(k_weight + at, mask=inside, other=0.0)[None, :]
    w = tl.where(is_q, q, k).to(tl.float32)
    if KIND == _RMS_ONE:
        w += 1.0
    return w


@triton.jit
def _rotate(qkv, stride, cos, sin, q_weight, k_weight, eps,
            Q_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr, PAD: tl.constexpr,
            ROTARY: tl.constexpr, NEIGHBOURS: tl.constexpr, KIND: tl.constexpr,
            AT_ONCE: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Program: normalises and rotates AT_ONCE heads of one token in place."""
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    c = tl.arange(0, PAD)
    inside = c < HEAD
    HALF: tl.constexpr = ROTARY // 2
    turns = c < ROTARY
    if NEIGHBOURS:
        partner = tl.where(turns, c ^ 1, c)
        angle = c // 2
        is_first = c % 2 == 0
    else:
        is_first = c < HALF
        partner = tl.where(turns, tl.where(is_first, c + HALF, c - HALF), c)
        angle = tl.where(is_first, c, c - HALF)
    mask = (head < HEADS)[:, None] & inside[None, :]
    at = qkv + token * stride + head[:, None] * HEAD
    x = tl.load(at + c[None, :], mask=mask, other=0.0)
    y = tl.load(at + partner[None, :], mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    if KIND != _NONE:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD + eps)[:, None]
        is_q = (head < Q_HEADS)[:, None]
        x *= scale
        y *= scale
        if KIND == _RMS:
            x = x.to(dtype).to(tl.float32)
            y = y.to(dtype).to(tl.float32)
        x *= _head_weight(q_weight, k_weight, c, is_q, inside, KIND)
        y *= _head_weight(q_weight, k_weight, partner, is_q, inside, KIND)
        x = x.to(dtype).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
    if ROTARY > 0:
        p = tl.load(cos + token * HALF + angle, mask=turns, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + token * HALF + angle, mask=turns, other=0.0).to(tl.float32)[None, :]
        x = x * p + tl.where(is_first[None, :], -y, y) * s
    tl.debug_barrier()
    tl.store(at + c[None, :], x.to(dtype), mask=mask)


@triton.jit
def _gated(x, token, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
           GATED: tl.constexpr):  # fmt: skip
    """Returns BLOCK activated numbers from column `first`, rounded to x's dtype, as float32.

    0 past the row.
    """
    c = first + tl.arange(0, BLOCK)
    mask = c < WIDTH
    row = 2 * WIDTH if GATED else WIDTH
    value = tl.load(x + token * row + c, mask=mask, other=0.0)
    dtype: tl.constexpr = value.dtype
    y = activated(value.to(tl.float32), ACTIVATION, dtype)
    if GATED:
        y *= tl.load(x + token * row + WIDTH + c, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, y.to(dtype).to(tl.float32), 0.0)


@triton.jit
def _gate(x, out, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
          GATED: tl.constexpr, ROUND: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Program: activates BLOCK numbers of a row, to `out` or rounded: see `_store_rounded`.

    With a scale per row, a program handles the whole row, which it keeps in registers.
    """
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    if ROUND == _BY_ROW:
        largest = tl.zeros((BLOCK,), tl.float32)
        parts = ()
        for first in tl.static_range(0, WIDTH, BLOCK):
            y = _gated(x, token, first, WIDTH, BLOCK, ACTIVATION, GATED)
            largest = tl.maximum(largest, tl.abs(y))
            parts = parts + (y,)  # noqa: RUF005 - Triton unpacks no tuples
        scale = tl.max(largest, 0) / 448.0
        scale = tl.where(scale > 0, scale, 1.0)
        tl.store(scales + token, scale)
        for part in tl.static_range(0, (WIDTH + BLOCK - 1) // BLOCK):
            shares = quotients(parts[part], scale)
            c = part * BLOCK + tl.arange(0, BLOCK)
            rounded = saturated(shares).to(codes.dtype.element_ty)
            tl.store(codes + token * WIDTH + c, rounded, mask=c < WIDTH)
    else:
        first = tl.program_id(1) * BLOCK
        c = first + tl.arange(0, BLOCK)
        y = _gated(x, token, first, WIDTH, BLOCK, ACTIVATION, GATED)
        if ROUND == _EXACT:
            tl.store(out + token * WIDTH + c, y.to(out.dtype.element_ty), mask=c < WIDTH)
        else:
            _store_rounded(y, codes, scales, token, first, WIDTH, BLOCK, ROUND, GROUP)


@triton.jit(do_not_specialize=("count",))
def _gate_heads(x, gate, gate_stride, head_stride, count, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                PAD: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Program: gates ROWS of `count` heads in place. Rounds where the module's sigmoid and product round."""
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, PAD)
    there = (r < count)[:, None] & (c < WIDTH)[None, :]
    token, head = (r // HEADS).to(tl.int64), r % HEADS
    at = x + r.to(tl.int64)[:, None] * WIDTH + c[None, :]
    value = tl.load(at, mask=there, other=0.0)
    strength = tl.load(
        gate + (token * gate_stride + head * head_stride)[:, None] + c[None, :],
        mask=there,
        other=0.0,
    )
    strength = 1.0 / (1.0 + tl.exp(-strength.to(tl.float32)))
    value = value.to(tl.float32) * strength.to(value.dtype).to(tl.float32)
    tl.store(at, value.to(x.dtype.element_ty), mask=there)
