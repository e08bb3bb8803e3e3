"""Kernels over states in 8 bits give what they give over decoded numbers, and store what the codec stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.geometry import StateGeometry, StateKind
from kvant.kv.spec import StateSpec
from kvant.kv.state_pool import StateCache
from kvant.models.recurrent.packed import Packed
from tests.attention import driver
from tests.models.recurrent.test_scan import ROWS, packed

kernels = pytest.importorskip("kvant.models.recurrent.kernels")
chunk_kernels = pytest.importorskip("kvant.models.recurrent.delta_chunks")
layer_kernels = pytest.importorskip("kvant.models.recurrent.delta_layer")
stored = pytest.importorskip("kvant.models.recurrent.stored")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
PLACES, STARTS = [3, 0, 7], [5, 0, 100]
HEADS, KEY_HEADS = 4, 2


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def held(planes: tuple[Tensor, ...], dtype: KVDtype, shape: tuple[int, ...]) -> Any:
    spec = StateSpec(StateGeometry(StateKind.RECURRENT, shape), driver.choice(dtype))
    return stored.Stored.of(StateCache(spec, planes))


def where() -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(PLACES, device=DEVICE),
        torch.tensor(STARTS, dtype=torch.int32, device=DEVICE),
    )


def of_delta(values: int, keys: int, count: int) -> tuple[Tensor, ...]:
    channels = 2 * KEY_HEADS * keys + HEADS * values
    of_heads = random(HEADS), random(HEADS)
    return random(count, channels), random(count, HEADS), random(count, HEADS), *of_heads


def a_token(values: int, keys: int) -> Callable[[Any], Tensor]:
    given = of_delta(values, keys, len(PLACES))
    return lambda state: kernels.delta_step(*given, state, *where(), KEY_HEADS, strongest=1.0)


def between_products(values: int, keys: int) -> Callable[[Any], Tensor]:
    qkv, a, b, a_log, dt_bias = of_delta(values, keys, len(PLACES))
    z, weight, norm = random(len(qkv), HEADS * values), random(qkv.shape[1], 4), random(values)
    kept = random(ROWS + 1, 3, qkv.shape[1])
    return lambda state: layer_kernels.delta_layer(
        qkv, z, a, b, weight, None, a_log, dt_bias, norm, 1e-5, kept.clone(), state, *where(), KEY_HEADS,
        strongest=1.0,
    )  # fmt: skip


def in_chunks(values: int, keys: int) -> Callable[[Any], Tensor]:
    lengths = [70, 2, 130]
    given = of_delta(values, keys, sum(lengths))
    step = packed(STARTS, lengths, PLACES).step
    assert step.rows is not None
    there = Packed.of(
        replace(
            step, cu_seqlens_q=step.cu_seqlens_q.to(DEVICE), seqlens_kv=step.seqlens_kv.to(DEVICE),
            rows=step.rows.to(DEVICE),
        )
    )  # fmt: skip
    chunks = there.chunks(64)
    assert chunks is not None

    def run(state: Any) -> Tensor:
        out = torch.zeros(sum(lengths), HEADS, values, device=DEVICE)
        chunk_kernels.delta_chunks(*given, state, there, chunks, KEY_HEADS, out, strongest=1.0)
        return out

    return run


def of_mamba2(values: int, keys: int) -> Callable[[Any], Tensor]:
    n, groups = len(PLACES), 2
    mixed, dt = random(n, HEADS * values + 2 * groups * keys), random(n, HEADS)
    a_log, dt_bias, d = random(HEADS), random(HEADS), random(HEADS)
    limits = (0.0, float("inf"))
    return lambda state: kernels.mamba_step(
        mixed, dt, a_log, dt_bias, d, state, *where(), groups, limits
    )


@pytest.mark.parametrize("make", [a_token, between_products, in_chunks, of_mamba2])
@pytest.mark.parametrize(
    "dtype", [KVDtype.INT8_PER_TOKEN_HEAD, KVDtype.FP8_PER_TOKEN_HEAD], ids=str
)
@pytest.mark.parametrize(("values", "keys"), [(24, 20)])
def test_states_in_8_bits(make: Any, dtype: KVDtype, values: int, keys: int) -> None:
    torch.manual_seed(0)
    codec, run = codec_for(dtype), make(values, keys)
    planes = codec.encode(random(ROWS + 1, HEADS, values, keys), None)
    numbers = codec.decode(planes, None, torch.float32)
    untouched = [row for row in range(ROWS + 1) if row not in PLACES]
    before = [plane[untouched].clone() for plane in planes]
    shape = HEADS, values, keys
    expected = run(held((numbers,), KVDtype.FLOAT32, shape))
    out = run(held(planes, dtype, shape))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for plane, old in zip(planes, before, strict=True):
        assert torch.equal(plane[untouched], old)
    codes, scales = (plane[PLACES] for plane in planes)
    wanted, wanted_scales = codec.encode(numbers[PLACES], None)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-5, atol=0)
    assert (codes == wanted).float().mean() > 0.99  # a last place of a number may round otherwise
    found = codec.decode((codes, scales), None, torch.float32)
    torch.testing.assert_close(
        found, codec.decode((wanted, wanted_scales), None, torch.float32), rtol=0.13,
        atol=float(scales.max()) if dtype is KVDtype.INT8_PER_TOKEN_HEAD else 1e-3,
    )  # fmt: skip
