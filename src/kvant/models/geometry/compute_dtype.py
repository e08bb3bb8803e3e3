"""Resolves the dtype that a model computes in (`--dtype auto`), with its reason. No torch."""

from __future__ import annotations

from pathlib import Path

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import ModelGeometry

_HALF = (ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16)

# x86 names its bfloat16 dot products and tiles, ARM its whole extension.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_AVX2_FLAGS = frozenset({"avx2", "fma", "f16c"})


def resolve_compute_dtype(
    requested: ComputeDtype | None, geometry: ModelGeometry, device: DeviceFacts
) -> tuple[ComputeDtype, str]:
    """Returns the dtype and the reason. requested: None means `auto`.

    auto is the config's dtype, but float32 instead of a 16-bit dtype on a CPU without bfloat16
    arithmetic. Such a CPU converts 16-bit products element by element, which is slower than
    float32 and less exact.
    """
    if requested is not None:
        return requested, f"--dtype {requested.value}"
    said = geometry.dtype
    if device.kind is DeviceKind.CPU and not device.has_bf16 and said in _HALF:
        return (
            ComputeDtype.FLOAT32,
            f"config.json says {said.value}, but this CPU has no bfloat16 arithmetic",
        )
    return said, "config.json's dtype"


def host_cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether this machine's CPU multiplies bfloat16 numbers, by the flags that Linux lists.

    Returns False without such a list (macOS, Windows).
    """
    return not _BF16_FLAGS.isdisjoint(_cpu_flags(cpuinfo))


def host_cpu_has_avx2(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether this machine's CPU has AVX2, FMA and F16C; False without Linux's list."""
    return _cpu_flags(cpuinfo) >= _AVX2_FLAGS


def _cpu_flags(cpuinfo: Path) -> set[str]:
    """Returns the first processor's flags."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()
