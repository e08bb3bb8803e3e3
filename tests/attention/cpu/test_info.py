"""What the CPU backend says of a need, without numba, and who is chosen on a CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvant.attention.cpu import info
from kvant.attention.need import DeviceFacts, DeviceKind, Need
from kvant.attention.select import select, slow_layers
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.kv.spec import Rejected
from kvant.models.geometry.compute_dtype import host_cpu_has_avx2
from tests.attention import driver

CPU = DeviceFacts(DeviceKind.CPU)
OLD = DeviceFacts(DeviceKind.CPU, has_avx2=False)
SERVED = [dtype for dtype in KVDtype if dtype is not KVDtype.FP8_E4M3FNUZ]


def need(k: KVDtype = KVDtype.FLOAT32, device: DeviceFacts = CPU, head_dim: int = 64) -> Need:
    layer = driver.layer(head_dim_k=head_dim)
    return Need(layer, k, k, ComputeDtype.FLOAT32, 16, device)


@pytest.mark.parametrize("dtype", SERVED, ids=str)
def test_on_a_cpu_every_format_is_served_before_the_reference_backend(dtype: KVDtype) -> None:
    assert select(need(dtype)).backend == info.INFO.name


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (need(device=OLD), "AVX2"),
        (need(device=DeviceFacts(DeviceKind.CUDA, "sm_90")), "CPUs"),
        (need(KVDtype.FP8_E4M3FNUZ), "no kernels"),
        (need(head_dim=24), "24"),
        (need(head_dim=1024), "1024"),
        (replace(need(), compute=ComputeDtype.FLOAT64), "float64"),
        (replace(need(), layer=driver.layer(num_q_heads=5, num_kv_heads=2)), "evenly"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_cannot_serve_is_refused_with_the_reason(wanted: Need, says: str) -> None:
    assert says in (info.refuse(wanted) or "")


def test_without_numba_the_reference_backend_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    found = select(need())
    assert found.backend == "reference"
    assert Rejected("cpu", "the package numba is not installed") in found.rejected


def test_batch_invariant_results_need_no_other_backend() -> None:
    assert select(replace(need(), batch_invariant=True)).backend == info.INFO.name


def test_a_plan_says_once_that_attention_will_be_slow() -> None:
    made = driver.plan([driver.layer(index=i) for i in range(3)])
    rejected = (Rejected("cpu", "its kernels need a CPU with AVX2"),)
    layers = tuple(replace(layer, rejected=rejected) for layer in made.layers)
    (line,) = slow_layers(replace(made, layers=layers))
    assert "3 of 3" in line
    assert "AVX2" in line
    assert slow_layers(made) == ()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("fpu avx2 fma f16c", True), ("fpu avx2 fma", False), ("fpu avx f16c", False)],
)
def test_avx2_is_read_from_linux_s_list(tmp_path: Path, flags: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    assert host_cpu_has_avx2(path) is expected
    assert host_cpu_has_avx2(tmp_path / "missing") is False
