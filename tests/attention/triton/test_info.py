"""What the Triton backend says of a need, without triton or a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.reference.info import INFO as REFERENCE
from kvant.attention.select import select
from kvant.attention.triton import info
from kvant.kv.dtype import ComputeDtype, KVDtype
from tests.attention import driver

H200 = DeviceFacts(DeviceKind.CUDA, "sm_90")


def need(k: KVDtype, v: KVDtype | None = None, device: DeviceFacts = H200) -> Need:
    layer = driver.layer(head_dim_k=128)
    return Need(layer, k, v or k, ComputeDtype.BFLOAT16, 16, device)


@pytest.mark.parametrize(
    "name", [n for n in KVDtype if n in info.SERVED - {KVDtype.FP8_E4M3FNUZ}], ids=str
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_90a"])
def test_every_format_of_nvidia_is_served_from_sm_80(name: KVDtype, arch: str) -> None:
    assert info.refuse(need(name, device=DeviceFacts(DeviceKind.CUDA, arch))) is None


def test_a_format_without_kernels_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "SERVED", info.SERVED - {KVDtype.TURBOQUANT_K4})
    assert "turboquant_k4" in (info.refuse(need(KVDtype.TURBOQUANT_K4)) or "")
    assert info.refuse(need(KVDtype.TURBOQUANT_K3)) is None


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_three_bits_are_refused_where_rows_are_no_whole_units(head_dim: int) -> None:
    layer = driver.layer(head_dim_k=head_dim)
    for k, v in (
        (KVDtype.TURBOQUANT_K3, KVDtype.BFLOAT16),
        (KVDtype.BFLOAT16, KVDtype.TURBOQUANT_V3),
    ):
        reason = info.refuse(replace(need(k, v), layer=layer))
        assert (reason is not None and "80" in reason) if head_dim == 80 else reason is None


def test_pages_that_cannot_be_cleared_in_whole_words_are_refused() -> None:
    one_head = replace(driver.layer(head_dim_k=64), num_kv_heads=1)
    smallest = replace(need(KVDtype.TURBOQUANT_K4), layer=one_head, page_size=1)
    assert "larger" in (info.refuse(smallest) or "")
    assert info.refuse(replace(smallest, page_size=2)) is None
    assert info.refuse(replace(smallest, k=KVDtype.BFLOAT16, v=KVDtype.BFLOAT16)) is None


def test_the_encoding_of_gfx942_is_refused_elsewhere_with_the_reason() -> None:
    assert "gfx942" in (info.refuse(need(KVDtype.FP8_E4M3FNUZ)) or "")
    gfx942 = DeviceFacts(DeviceKind.ROCM, "gfx942")
    assert info.refuse(need(KVDtype.FP8_E4M3FNUZ, device=gfx942)) is None


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (DeviceFacts(DeviceKind.CPU), "GPUs only"),
        (DeviceFacts(DeviceKind.CUDA, "sm_75"), "sm_75"),
        (DeviceFacts(DeviceKind.CUDA), "unknown"),
        (DeviceFacts(DeviceKind.ROCM, "gfx1100"), "gfx1100"),
    ],
    ids=str,
)
def test_a_device_it_cannot_use_is_named(device: DeviceFacts, says: str) -> None:
    assert says in (info.refuse(need(KVDtype.BFLOAT16, device=device)) or "")


def test_shapes_it_cannot_use_are_named() -> None:
    fine = need(KVDtype.BFLOAT16)
    assert "1024" in (info.refuse(replace(fine, layer=driver.layer(head_dim_k=1024))) or "")
    assert "24" in (info.refuse(replace(fine, page_size=24)) or "")
    assert "float64" in (info.refuse(replace(fine, compute=ComputeDtype.FLOAT64)) or "")


def test_a_gpu_is_planned_with_triton_and_the_reference_only_by_name() -> None:
    asked = need(KVDtype.FP8_E4M3)
    served = select(asked)
    assert served.backend == "triton"
    refused = replace(asked, compute=ComputeDtype.FLOAT64)
    assert not select(refused).is_served
    assert "by name" in str(select(refused).rejected)
    assert select(refused, only=REFERENCE).backend == "reference"
