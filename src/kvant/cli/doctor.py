"""`kvant doctor`: checks which parts of Kvant work on this machine, and why others do not. No network."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvant.cli.output import plain

if TYPE_CHECKING:
    from rich.console import Console

    from kvant.attention.need import BackendInfo, DeviceFacts, Need
    from kvant.kv.dtype import KVDtype

CHECKED = ("torch", "transformers")
"""Required packages that are also imported, because only an import shows a broken installation."""

OPTIONAL = {
    "compressed-tensors": "checkpoints with quantised weights (pip install 'kvant[quantized]')",
    "matplotlib": "kvant plan --plot (pip install 'kvant[plot]')",
    "triton": "the triton attention backends",
    "flashinfer-python": "faster prompts on Hopper GPUs (pip install 'kvant[flashinfer]')",
}


class State(Enum):
    """The state of a finding, with its colour. FAULT keeps Kvant from running models; WARN may matter."""

    GOOD = "green"
    INFO = "dim"
    WARN = "yellow"
    FAULT = "red"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: State
    text: str


def doctor() -> None:
    """Check packages, devices, memory, models and formats here."""
    from rich.console import Console

    console = Console()
    faults = 0
    for title, findings in (
        ("Software", _software()),
        ("Machine", _machine()),
        ("Models", _models()),
    ):
        console.print(f"[bold]{title}[/]")
        for finding in findings:
            faults += finding.state is State.FAULT
            plain(console, f"  {finding.name:20}", end="")
            plain(console, finding.text, finding.state.value)
    if faults:
        console.print(f"[red]{faults} of these keep Kvant from running models.[/]")
        raise typer.Exit(2)
    _print_formats(console)


def _software() -> Iterator[Finding]:
    from kvant import __version__

    yield Finding("kvant", State.GOOD, __version__)
    text = f"{platform.python_version()} ({sys.executable})"
    yield _tested("python", text, importlib.metadata.metadata("kvant")["Requires-Python"])
    for name in CHECKED:
        yield _required(name)
    for name, purpose in OPTIONAL.items():
        version = _version(name)
        text = f"not installed; for {purpose}" if version is None else version
        yield Finding(name, State.INFO if version is None else State.GOOD, text)


def _required(name: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, State.FAULT, f"not installed: pip install {name}")
    try:
        importlib.import_module(name)
    except Exception as fault:  # a broken installation may raise anything
        return Finding(name, State.FAULT, f"{version}, but importing it fails: {fault}")
    required = importlib.metadata.requires("kvant") or ()
    return _tested(name, version, next(line for line in required if re.match(rf"{name}\W", line)))


def _tested(name: str, version: str, window: str) -> Finding:
    """Returns whether a version is tested. version: a text that begins with the version.

    window: a requirement with >= and <, as in pyproject.toml.
    """
    low, high = re.findall(r">=([\d.]+)", window)[0], re.findall(r"<([\d.]+)", window)[0]
    if _numbers(low) <= _numbers(version) < _numbers(high):
        return Finding(name, State.GOOD, version)
    untested = f"{version}: untested; Kvant is tested from {low} to below {high}"
    return Finding(name, State.WARN, untested)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _machine() -> Iterator[Finding]:
    from kvant.kv.memory import format_size
    from kvant.models.geometry.compute_dtype import host_cpu_has_bf16
    from kvant.plan.budget import CPU_SHARE
    from kvant.plan.device import free_host_bytes

    bf16 = "with" if host_cpu_has_bf16() else "without"
    yield Finding("cpu", State.GOOD, f"{os.cpu_count()} cores, {bf16} bfloat16 arithmetic")
    free = free_host_bytes()
    share = format_size(free * CPU_SHARE)
    yield Finding(
        "memory",
        State.GOOD,
        f"{format_size(free)} free; a CPU's KV cache takes up to {share} of it",
    )
    yield from _accelerators()


def _accelerators() -> Iterator[Finding]:
    from kvant.kv.memory import format_size

    try:
        import torch
    except Exception:  # `_software` reports it
        return
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch finds none" if built else "this torch is a CPU build"
        yield Finding("accelerator", State.INFO, f"none ({why})")
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding(
            f"cuda:{index}",
            State.GOOD,
            f"{facts.name}, sm_{major}{minor}, {format_size(free)} of {format_size(total)} free",
        )


def _models() -> Iterator[Finding]:
    from kvant.models.demo import DEMO_NAME, demo_gguf
    from kvant.models.import_cache import cache_root

    try:
        yield Finding(DEMO_NAME, State.GOOD, f"installed: {demo_gguf()}")
    except Exception as fault:  # not installed, or an unknown version: the message says which
        yield Finding(DEMO_NAME, State.WARN, str(fault))
    yield _place("kvant cache", cache_root())
    try:
        from huggingface_hub import constants, get_token
    except Exception as fault:
        yield Finding("huggingface_hub", State.FAULT, f"importing it fails: {fault}")
        return
    yield _place("hub cache", Path(constants.HF_HUB_CACHE))
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", State.WARN, "offline (HF_HUB_OFFLINE): only models in the cache")
    else:
        with_token = "with" if get_token() else "without"
        yield Finding(
            "hub", State.GOOD, f"{constants.ENDPOINT}, {with_token} a token; not contacted"
        )


def _place(name: str, path: Path) -> Finding:
    """Returns a finding about a directory, which need not exist yet, and the free space there."""
    from kvant.kv.memory import format_size

    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    text = f"{path}, {format_size(free)} of disk free"
    if not os.access(existing, os.W_OK):
        return Finding(name, State.WARN, f"{text}, but it cannot be written to")
    return Finding(name, State.GOOD if free > 2**30 else State.WARN, text)


def _print_formats(console: Console) -> None:
    """Prints which formats each backend serves on this machine's device, and why it refuses others."""
    from rich.table import Table

    from kvant.attention.select import BACKENDS, by_name_only, refusal
    from kvant.kv.dtype import KVDtype
    from kvant.kv.names import known_names
    from kvant.plan.device import host_device

    device = host_device("auto")
    where = device.kind.value + (f" ({device.arch})" if device.arch else "")
    console.print(
        f"[bold]KV formats on {where}[/], for heads of size 128; kvant plan shows them per model"
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
    table.add_column("  format")
    for info in BACKENDS:
        table.add_column(info.name)
    reasons: list[str] = []
    for dtype in KVDtype:
        if dtype.format.name not in known_names():
            continue
        need = _typical_need(dtype, device)
        cells = []
        for info in BACKENDS:
            no = refusal(need, info) or _missing_package(info)
            reason = no or by_name_only(need, info)
            if reason is None:
                cells.append("[green]yes[/]")
                continue
            text = f"{info.name}: {reason}"
            if text not in reasons:
                reasons.append(text)
            word = "no" if no else "by name"
            cells.append(f"[yellow]{word} ({reasons.index(text) + 1})[/]")
        table.add_row(f"  {dtype}", *cells)
    console.print(table)
    for number, text in enumerate(reasons, start=1):
        console.print(f"  ({number}) {text}", style="dim", markup=False, highlight=False)
    console.print("  kvant verify checks each of them here against the definition in float64")


def _missing_package(info: BackendInfo) -> str | None:
    """Returns why a backend cannot run here for lack of a package, or None."""
    if info.package is not None and importlib.util.find_spec(info.package) is None:
        return f"the package {info.package} is not installed"
    return None


def _typical_need(dtype: KVDtype, device: DeviceFacts) -> Need:
    from kvant.attention.need import Need
    from kvant.kv.dtype import ComputeDtype
    from kvant.kv.geometry import Attention, LayerGeometry

    layer = LayerGeometry(
        index=0,
        name="model.layers.0.self_attn",
        attention=Attention.FULL,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim_k=128,
        head_dim_v=128,
    )
    compute = ComputeDtype.BFLOAT16 if device.has_bf16 else ComputeDtype.FLOAT32
    return Need(layer, dtype, dtype, compute, 16, device)
