"""The bugs that Kvant was founded on, held off in every backend: on GPUs with python -m pytest -m gpu."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvant.attention.base import AttentionBackend, AttentionParams
from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind, Need
from kvant.attention.select import BACKENDS, refusal
from kvant.attention.verify import definition
from kvant.attention.verify.trial import Trial, bound_of, run_trial
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.pool import KVPool
from kvant.kv.spec import KVPlan, LayerSpec, Role, Source
from tests.attention import driver

HOST = DeviceFacts(DeviceKind.CPU)
HOPPER = DeviceFacts(DeviceKind.CUDA, "sm_90")
ON_GPUS = ("triton", "triton_fp8", "flashinfer")
STEP = ((33, 5), (1, 1), (20, 17))
NATIVE = (KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.BFLOAT16)
COMPUTE = (ComputeDtype.FLOAT32, ComputeDtype.FLOAT16, ComputeDtype.BFLOAT16)


def backends() -> Iterator[object]:
    for info in BACKENDS:
        marks = [pytest.mark.gpu] if info.name in ON_GPUS else []
        yield pytest.param(info, id=info.name, marks=marks)


every_backend = pytest.mark.parametrize("info", list(backends()))


def facts_of(info: BackendInfo) -> DeviceFacts:
    return HOPPER if info.name in ON_GPUS else HOST


def device_of(info: BackendInfo) -> torch.device:
    return torch.device("cuda" if info.name in ON_GPUS else "cpu")


def made(info: BackendInfo) -> AttentionBackend:
    backend: AttentionBackend = importlib.import_module(info.module).backend()
    return backend


def need(info: BackendInfo, k: KVDtype, v: KVDtype, compute: ComputeDtype) -> Need:
    layer = driver.layer(num_q_heads=8, num_kv_heads=2, head_dim_k=64)
    return Need(layer, k, v, compute, 16, facts_of(info))


def needs(info: BackendInfo, k: KVDtype) -> list[Need]:
    """What this backend says it serves with such keys: values alike and others, in every compute dtype."""
    formats = list(KVDtype)
    other = formats[(formats.index(k) + 5) % len(formats)]
    asked = [need(info, k, v, compute) for v in (k, other) for compute in COMPUTE]
    return [one for one in asked if refusal(one, info) is None]


@pytest.mark.case("F4")
@every_backend
@pytest.mark.parametrize("k", list(KVDtype), ids=str)
def test_what_a_backend_accepts_its_writer_stores_and_its_reader_reads(
    info: BackendInfo, k: KVDtype
) -> None:
    served = needs(info, k)
    if not served:
        pytest.skip(refusal(need(info, k, k, COMPUTE[2]), info) or "")
    backend, device = made(info), device_of(info)
    for one in served:
        outcome = run_trial(backend, Trial(one, STEP, odd_rows=True), device)
        assert outcome.wrong is None, f"{one.k}/{one.v} in {one.compute.value}: {outcome.wrong}"


def spec(index: int, k: KVDtype, v: KVDtype, source: Source, info: BackendInfo) -> LayerSpec:
    geometry = driver.layer(index=index, num_q_heads=8, num_kv_heads=2, head_dim_k=64)
    k_choice, v_choice = (
        replace(driver.choice(dtype, fixed_scale=0.013), source=source) for dtype in (k, v)
    )
    return LayerSpec(geometry, k_choice, v_choice, info.name)


def step_on(device: torch.device) -> object:
    made = driver.step([[3, 1], [4]], [20, 9], [20, 9])
    names = ("cu_seqlens_q", "seqlens_kv", "page_table", "slot_mapping", "positions")
    return replace(made, **{name: getattr(made, name).to(device) for name in names})


def run(
    specs: list[LayerSpec], compute: ComputeDtype, info: BackendInfo
) -> tuple[KVPool, list[Tensor]]:
    """Every layer writes, then every layer attends: one pool, one backend, numbers of their own."""
    device = device_of(info)
    plan = KVPlan(Role.TARGET, "test", compute, "test", 16, tuple(specs))
    pool = KVPool(plan, 6, device=device, scales={})
    backend, step = made(info), step_on(device)
    dtype = getattr(torch, compute.value)

    def rows(layer: int, heads: int) -> Tensor:
        random = torch.Generator().manual_seed(100 * layer + heads)
        return torch.randn(29, heads, 64, generator=random).to(dtype).to(device)

    for layer in range(len(specs)):
        backend.write(pool[layer], rows(layer, 2), rows(layer, 2) * 2, step)  # type: ignore[arg-type]
    found = []
    for layer in range(len(specs)):
        params = AttentionParams(scale=0.125)
        out = backend.attend(pool[layer], rows(layer, 8), step, params)  # type: ignore[arg-type]
        right = definition.attend(pool[layer], rows(layer, 8), step, params)  # type: ignore[arg-type]
        error = float((out.double() - right).norm() / right.norm())
        k, v = specs[layer].k, specs[layer].v
        assert k is not None
        assert v is not None
        assert error < bound_of(need(info, k.dtype, v.dtype, compute))
        planes = definition.stored_planes(
            pool[layer], rows(layer, 2), rows(layer, 2) * 2, step.slot_mapping  # type: ignore[attr-defined]
        )  # fmt: skip
        for plane, expected in zip((*pool[layer].k, *pool[layer].v), planes, strict=True):
            assert torch.equal(plane.view(torch.uint8), expected.view(torch.uint8))
        found.append(out)
    return pool, found


@pytest.mark.case("F2")
@every_backend
@pytest.mark.parametrize("compute", COMPUTE, ids=lambda dtype: dtype.value)
def test_an_unquantised_format_is_the_same_bits_whether_it_was_asked_for_or_not(
    info: BackendInfo, compute: ComputeDtype
) -> None:
    served = [dtype for dtype in NATIVE if refusal(need(info, dtype, dtype, compute), info) is None]
    if not served:
        pytest.skip(refusal(need(info, NATIVE[0], NATIVE[0], compute), info) or "")
    for dtype in served:
        asked, unset = (
            run([spec(0, dtype, dtype, source, info)], compute, info)
            for source in (Source.EXPLICIT, Source.MODEL)
        )
        assert torch.equal(asked[1][0], unset[1][0])
        for a, b in zip(asked[0].planes(), unset[0].planes(), strict=True):
            assert a.dtype is getattr(torch, dtype.format.name)
            assert torch.equal(a, b)


@pytest.mark.case("F3")
@every_backend
def test_layers_beside_each_other_are_stored_and_read_by_their_own_spec(
    info: BackendInfo,
) -> None:
    """fp8 with skipped layers, in both orders, K and V apart: nothing is taken from a neighbour."""
    compute = ComputeDtype.BFLOAT16
    formats = (KVDtype.FP8_E4M3, KVDtype.BFLOAT16, KVDtype.INT4_PER_TOKEN_HEAD)
    served = [
        pair
        for pair in itertools.product(formats, repeat=2)
        if refusal(need(info, *pair, compute), info) is None
    ]
    if not served:
        pytest.skip(refusal(need(info, NATIVE[2], NATIVE[2], compute), info) or "")
    orders = [served, served[::-1], served[1::2] + served[::2]]
    for order in orders:
        specs = [spec(i, k, v, Source.EXPLICIT, info) for i, (k, v) in enumerate(order)]
        pool, _ = run(specs, compute, info)
        sizes = [
            sum(plane[0, 0].numel() * plane.element_size() for plane in (*cache.k, *cache.v))
            for cache in (pool[i] for i in range(len(specs)))
        ]
        assert sizes == [spec.bytes_per_token for spec in specs]
