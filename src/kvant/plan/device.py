"""The device of this machine: its kind, and its memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import NotServable, UnknownName, WayOut
from kvant.models.geometry.compute_dtype import host_cpu_has_avx2, host_cpu_has_bf16
from kvant.plan.facts import DeviceMemory

if TYPE_CHECKING:
    import torch

_ACCELERATOR_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))


def host_device(name: str, *, asked_by: str = "--device") -> DeviceFacts:
    """Returns the device named `auto` (an accelerator if there is one), `cpu` or `cuda`.

    With several GPUs it is this thread's current GPU. torch is imported only if the system has an
    accelerator, so that refusals are fast. Raises UnknownName, and NotServable for `cuda` without a device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UnknownName("device", name, ("auto", "cpu", "cuda"), asked_by=asked_by)
    if name != "cpu":
        found = _accelerator()
        if found is not None:
            return found
        if name == "cuda":
            raise NotServable(
                f"{asked_by} cuda: torch finds no such device here",
                ways_out=(WayOut("run on the CPU", ("--device", "cpu")),),
            )
    return DeviceFacts(DeviceKind.CPU, has_bf16=host_cpu_has_bf16(), has_avx2=host_cpu_has_avx2())


def _accelerator() -> DeviceFacts | None:
    if not any(node.exists() for node in _ACCELERATOR_NODES):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties().gcnArchName.split(":")[0]
        return DeviceFacts(DeviceKind.ROCM, arch)
    major, minor = torch.cuda.get_device_capability()
    return DeviceFacts(DeviceKind.CUDA, f"sm_{major}{minor}", has_bf16=major >= 8)


def torch_device(facts: DeviceFacts) -> torch.device:
    """Returns the torch device that these facts describe; torch calls AMD's devices cuda too."""
    import torch

    return torch.device("cpu" if facts.kind is DeviceKind.CPU else "cuda")


def chosen_gpu() -> int | None:
    """Returns this thread's current GPU in torch, or None if torch has not used a GPU yet."""
    torch = sys.modules.get("torch")
    return (
        torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None
    )


def work_on(gpu: int | None) -> None:
    """Makes `gpu`, which `chosen_gpu` returned in another thread, this thread's current GPU."""
    if gpu is not None:
        import torch

        torch.cuda.set_device(gpu)


def device_memory(facts: DeviceFacts, num_ranks: int = 1) -> DeviceMemory:
    """Returns the device's memory now, before anything is loaded.

    With several ranks it is that of the GPU with the least free memory, or an equal part of a CPU's memory.
    """
    if facts.kind is DeviceKind.CPU:
        free = free_host_bytes() // num_ranks
        return DeviceMemory(free, free)
    import torch

    first = torch.cuda.current_device()
    gpus = range(first, min(first + num_ranks, torch.cuda.device_count()))
    return min((DeviceMemory(*torch.cuda.mem_get_info(gpu)) for gpu in gpus), key=lambda m: m.free)


def free_host_bytes() -> int:
    """Returns the bytes that this process can still allocate, on the machine or within its container.

    On a system that does not report free memory, returns all installed memory.
    """
    known = [size for size in (_meminfo(), _cgroup()) if size is not None]
    return min(known) if known else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo() -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup() -> int | None:
    """Returns the bytes left under a container's limit, or None. Cached file pages count as free."""
    root = Path("/sys/fs/cgroup")
    limit, used = _read(root / "memory.max").strip(), _read(root / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return None
    cached = [
        int(line.split()[1])
        for line in _read(root / "memory.stat").splitlines()
        if line.startswith("inactive_file ")
    ]
    return max(0, int(limit) - int(used) + sum(cached))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
