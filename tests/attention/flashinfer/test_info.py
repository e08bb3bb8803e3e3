"""What the FlashInfer backend says of a need, without the package or a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvant.attention.flashinfer import info
from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.select import select
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.spec import Rejected
from tests.attention import driver

H200 = DeviceFacts(DeviceKind.CUDA, "sm_90")
FINE = Need(
    driver.layer(head_dim_k=128), KVDtype.BFLOAT16, KVDtype.BFLOAT16, ComputeDtype.BFLOAT16, 16, H200
)  # fmt: skip


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_refuse_package", lambda: None)


@pytest.mark.usefixtures("installed")
def test_16_bit_layers_on_hopper_are_its_own_where_it_is_installed() -> None:
    assert select(FINE, only=info.INFO).backend == "flashinfer"
    float16 = replace(
        FINE, k=KVDtype.FLOAT16, v=KVDtype.FLOAT16, compute=ComputeDtype.FLOAT16
    )  # fmt: skip
    assert select(float16, only=info.INFO).backend == "flashinfer"
    window = replace(FINE, layer=driver.layer(head_dim_k=256, window=512, softcap=30.0))
    assert select(window, only=info.INFO).backend == "flashinfer"


def test_where_it_is_missing_triton_serves_and_the_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = select(FINE)
    assert found.backend == "triton"
    missing = Rejected("flashinfer", "the package flashinfer-python is not installed")
    assert missing in found.rejected


def test_without_a_compiler_it_refuses_unless_a_package_brings_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = {"flashinfer"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert "nvcc" in (info.refuse(FINE) or "")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert "ninja" in (info.refuse(FINE) or "")
    there.add("flashinfer_jit_cache")
    assert info.refuse(FINE) is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (replace(FINE, device=DeviceFacts(DeviceKind.CPU)), "NVIDIA"),
        (replace(FINE, device=DeviceFacts(DeviceKind.CUDA, "sm_80")), "sm_80"),
        (replace(FINE, k=KVDtype.FP8_E4M3, v=KVDtype.FP8_E4M3), "Triton's"),
        (replace(FINE, v=KVDtype.FLOAT16), "Triton's"),
        (replace(FINE, compute=ComputeDtype.FLOAT32), "float32"),
        (replace(FINE, layer=driver.layer(head_dim_k=96)), "96"),
        (replace(FINE, layer=driver.layer(head_dim_k=128, head_dim_v=64)), "128/64"),
        (replace(FINE, layer=driver.layer(head_dim_k=128, sinks=True)), "sinks"),
        (replace(FINE, layer=driver.layer(head_dim_k=128, window=9, causal=False)), "ahead"),
        (replace(FINE, page_size=24), "24"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_does_not_serve_is_refused_with_the_reason(asked: Need, says: str) -> None:
    assert says in (info.refuse(asked) or "")


@pytest.mark.usefixtures("installed")
def test_as_long_as_cells_are_unverified_it_is_chosen_by_name_only() -> None:
    found = select(FINE)
    assert found.backend == "triton"
    assert "by name only: --attention-backend flashinfer" in found.rejected[0].reason


@pytest.mark.usefixtures("installed")
def test_in_batch_invariant_mode_it_is_not_chosen() -> None:
    asked = replace(FINE, batch_invariant=True)
    assert not select(asked, only=info.INFO).is_served
    assert select(asked).backend == "triton"
