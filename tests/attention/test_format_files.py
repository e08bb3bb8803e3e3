"""Every format has its kernel file in every family of kernels, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import pytest

from kvant.attention.cpu import formats as cpu
from kvant.attention.cpu import info as cpu_info
from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.triton import formats as triton
from kvant.attention.triton import info as triton_info
from kvant.kv.dtype import ComputeDtype, KVDtype
from tests.attention import driver

FAMILIES: dict[str, tuple[frozenset[KVDtype], Callable[[Need], str | None], DeviceFacts]] = {
    "cpu": (cpu.SERVED, cpu_info.refuse, DeviceFacts(DeviceKind.CPU)),
    "triton": (triton.SERVED, triton_info.refuse, DeviceFacts(DeviceKind.ROCM, "gfx942")),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", KVDtype, ids=str)
def test_a_format_is_served_or_refused_by_name(dtype: KVDtype, family: str) -> None:
    served, refuse, device = FAMILIES[family]
    layer = driver.layer(head_dim_k=64)
    reason = refuse(Need(layer, dtype, dtype, ComputeDtype.FLOAT32, 16, device))
    if dtype in served:
        assert reason is None
    else:
        assert str(dtype) in (reason or "")


@pytest.mark.parametrize("family", ["cpu", "cuda", "triton"])
def test_every_kernel_file_belongs_to_a_codec(family: str) -> None:
    folder = resources.files(f"kvant.attention.{family}").joinpath("formats")
    names = {file.name.partition(".")[0] for file in folder.iterdir()} - {"__init__", "__pycache__"}
    assert names, "no files found"
    assert names <= {dtype.format.codec for dtype in KVDtype}


def test_a_missing_file_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are made of the files: without one, its formats are refused and no others."""
    for dtype in KVDtype:
        assert triton.has_kernels(dtype)
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    assert not triton.has_kernels(KVDtype.NVFP4)
