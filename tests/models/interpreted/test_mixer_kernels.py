"""One-token kernels of KDA, Mamba2 and LFM2's convolution give their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.kv.geometry import StateKind
from kvant.models.recurrent.conv import causal_conv
from kvant.models.recurrent.scan import scan

pytest.importorskip("kvant.models.recurrent.kernels")

from kvant.models.recurrent.delta_layer import delta_layer
from kvant.models.recurrent.kernels import short_conv
from kvant.models.recurrent.mamba_layer import Finish, mamba_layer
from tests.models.interpreted.test_recurrent_kernels import (
    DEVICE,
    PLACES,
    before,
    defined,
    native,
    same,
    where,
)

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
N = len(PLACES)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def wide(x: Tensor) -> Tensor:
    return x.cpu().double()


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, silu: bool
) -> tuple[Tensor, Tensor]:
    """Outputs, and what is kept behind them."""
    return defined(
        lambda made, there: causal_conv(
            wide(x), weight.cpu(), None if bias is None else bias.cpu(), made, there, silu=silu
        ),
        state, StateKind.CONV, [1] * N,
    )  # fmt: skip


@pytest.mark.parametrize(("values", "keys"), [(16, 32), (40, 24)])
def test_a_token_of_kda(values: int, keys: int) -> None:
    torch.manual_seed(0)
    heads = 3
    width = heads * keys
    row = random(N, 2 * width + heads * values + heads)
    qkv, b = row.split([2 * width + heads * values, heads], 1)
    a, z, weight = random(N, width), random(N, heads * values), random(qkv.shape[1], 4)
    a_log, dt_bias, norm = random(1, 1, heads, 1), random(width), random(values)
    conv, state = before(3, qkv.shape[1]), before(heads, values, keys)
    mixed, moved = convolved(qkv, weight, None, conv, silu=True)

    def define(made: object, there: object) -> Tensor:
        q, k, v = mixed.split([width, width, heads * values], 1)
        q, k = (x.view(N, heads, keys) for x in (q, k))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        g = F.softplus(wide(a) + wide(dt_bias)).view(N, heads, keys)
        g = -wide(a_log).view(heads, 1).exp() * g
        v = v.view(N, heads, values)
        out = scan(q * keys**-0.5, k, v, g, wide(b).sigmoid(), made, there)  # type: ignore[arg-type]
        out = out * torch.rsqrt((out * out).mean(-1, keepdim=True) + 1e-5) * wide(norm)
        return out.flatten(1) * wide(z).sigmoid()

    expected = defined(define, state, StateKind.RECURRENT, [1] * N)
    out = delta_layer(
        qkv, z, a, b, weight, None, a_log, dt_bias, norm, 1e-5, conv, native(state), *where(), heads,
        strongest=1.0, by_key=True,
    )  # fmt: skip
    same((out, state), expected, [1] * N)
    same((out, conv), (expected[0], moved), [1] * N)


@pytest.mark.parametrize("kind", ["none", "gate first", "norm first"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("values", "keys"), [(24, 16), (40, 24)])
def test_a_token_of_mamba2(kind: str, groups: int, values: int, keys: int) -> None:
    torch.manual_seed(1)
    heads = 4
    width, each = heads * values, groups * keys
    row = random(N, 2 * width + 2 * each + heads)
    gate, inner, dt = row.split([width, width + 2 * each, heads], 1)
    weight, bias = random(inner.shape[1], 4), random(inner.shape[1])
    a_log, dt_bias, d = random(heads), random(heads), random(heads)
    norm = None if kind == "none" else random(width)
    conv, state = before(3, inner.shape[1]), before(heads, values, keys)
    mixed, moved = convolved(inner, weight, bias, conv, silu=True)

    def define(made: object, there: object) -> Tensor:
        x, k, q = mixed.split([width, each, each], 1)
        x, k, q = x.view(N, heads, values), k.view(N, groups, keys), q.view(N, groups, keys)
        step = F.softplus(wide(dt) + wide(dt_bias)).clamp(0.5, torch.inf)
        g = -step * wide(a_log).exp()
        out = scan(q, k, x * step[..., None], g, None, made, there)  # type: ignore[arg-type]
        out = (out + wide(d)[:, None] * x).flatten(1)
        z = F.silu(wide(gate))
        if norm is None:
            return out * z
        out = out * z if kind == "gate first" else out
        parts = out.view(N, groups, -1)
        parts = parts * torch.rsqrt((parts * parts).mean(-1, keepdim=True) + 1e-5)
        out = parts.flatten(1) * wide(norm)
        return out if kind == "gate first" else out * z

    expected = defined(define, state, StateKind.RECURRENT, [1] * N)
    finish = Finish(norm, width // groups, 1e-5, gate_first=kind == "gate first", rounded=True)
    out = mamba_layer(
        gate, inner, dt, weight, bias, a_log, dt_bias, d, conv, native(state), *where(), groups,
        (0.5, float("inf")), finish,
    )  # fmt: skip
    same((out, state), expected, [1] * N)
    same((out, conv), (expected[0], moved), [1] * N)


@pytest.mark.parametrize("size", [3, 7])
def test_a_token_of_a_short_convolution(size: int) -> None:
    torch.manual_seed(2)
    channels = 530
    row = random(N, 3 * channels + 2)[:, : 3 * channels]
    weight, bias, conv = random(channels, size), random(channels), before(size - 1, channels)
    b, c, x = row.chunk(3, 1)
    found, moved = convolved(wide(b) * wide(x), weight, bias, conv, silu=False)
    out = short_conv(row, weight, bias, conv, *where())
    same((out, conv), (wide(c) * found, moved), [1] * N)
