"""`--dtype auto`: the config's dtype, except where this CPU cannot compute in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.dtype import ComputeDtype
from kvant.models.geometry import read_geometry
from kvant.models.geometry.compute_dtype import host_cpu_has_bf16, resolve_compute_dtype
from tests.models.configs import published

F32, F16, BF16 = ComputeDtype.FLOAT32, ComputeDtype.FLOAT16, ComputeDtype.BFLOAT16
OLD_CPU = DeviceFacts(DeviceKind.CPU, has_bf16=False)
NEW_CPU = DeviceFacts(DeviceKind.CPU, has_bf16=True)
GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
OLD_GPU = DeviceFacts(DeviceKind.CUDA, "sm_75", has_bf16=False)


@pytest.mark.parametrize(
    ("said", "device", "expected"),
    [
        (BF16, OLD_CPU, F32),
        (F16, OLD_CPU, F32),
        (F32, OLD_CPU, F32),
        (BF16, NEW_CPU, BF16),
        (F16, NEW_CPU, F16),
        (F32, NEW_CPU, F32),
        (BF16, GPU, BF16),
        (BF16, OLD_GPU, BF16),
        (F16, GPU, F16),
    ],
)
def test_auto_is_the_configs_dtype_but_float32_on_cpus_without_bfloat16(
    said: ComputeDtype, device: DeviceFacts, expected: ComputeDtype
) -> None:
    geometry = read_geometry(published("qwen3-8b", torch_dtype=said.value))
    dtype, reason = resolve_compute_dtype(None, geometry, device)
    assert dtype is expected
    assert ("no bfloat16 arithmetic" in reason) == (expected is not said)
    assert (said.value in reason) == (expected is not said)


@pytest.mark.parametrize("device", [OLD_CPU, NEW_CPU, GPU])
@pytest.mark.parametrize("requested", list(ComputeDtype))
def test_an_explicit_dtype_wins_everywhere(requested: ComputeDtype, device: DeviceFacts) -> None:
    geometry = read_geometry(published("qwen3-8b"))
    dtype, reason = resolve_compute_dtype(requested, geometry, device)
    assert dtype is requested
    assert reason == f"--dtype {requested.value}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu sse2 avx512f avx512_bf16 amx_tile", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("flags\t\t: fpu sse2 avx512f avx512_fp16 avx512_vnni", False),
        ("Features\t: fp asimd sve bf16 i8mm", True),
        ("Features\t: fp asimd", False),
        ("bugs\t\t: avx512_bf16", False),
        ("", False),
    ],
)
def test_bfloat16_arithmetic_is_read_from_the_cpus_flags(
    line: str, expected: bool, tmp_path: Path
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nmodel name\t: bf16 CPU\n{line}\n")
    assert host_cpu_has_bf16(path) is expected


def test_a_machine_without_cpuinfo_is_taken_to_have_none(tmp_path: Path) -> None:
    assert host_cpu_has_bf16(tmp_path / "cpuinfo") is False
