"""Facts that accompany every measurement: date, command, commit, machine and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path


def measurement_facts(command: str, packages: Iterable[str]) -> dict[str, object]:
    """Returns date, command, commit, machine and versions, ready for JSON."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "commit": _commit(),
        "device": f"{processor()}, {os.cpu_count()} cores",
        "instructions": instructions(),
        **_accelerator(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def command_line(program: str, arguments: Sequence[str] | None = None) -> str:
    """Returns the command line, quoted for a shell. arguments: None for this process's own."""
    return f"{program} {shlex.join(sys.argv[1:] if arguments is None else arguments)}".rstrip()


def processor() -> str:
    """Returns the CPU's name, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def instructions() -> str:
    """Returns the CPU's instruction sets that kernels use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")
    return " ".join(flag for flag in wanted if flag in flags)


def _accelerator() -> dict[str, object]:
    """Returns the GPU and its driver; empty without a GPU, or if torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), **gpu_facts(), "cuda": torch.version.cuda}


def gpu_facts() -> dict[str, str]:
    """Returns the GPU of this machine and its driver, without torch; empty without a GPU."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
        return {"gpu": done.stdout.splitlines()[0]} if done.returncode == 0 else {}
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return {}


def _commit() -> str | None:
    """Returns the commit of the running source, with a plus if it is modified; None outside a repository."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
