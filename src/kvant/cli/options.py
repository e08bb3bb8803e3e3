"""Flags that several commands share, and the one place where they become typed requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.engine.config import ENV_KV_CACHE_DTYPE, flag_and_value, kv_requests
from kvant.errors import UnknownName
from kvant.kv.request import Requests
from kvant.models.geometry.compute_dtype import host_cpu_has_bf16

KV_PANEL = "KV cache"

KVCacheDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="F|K/V",
        help="Format of the KV cache: a name, K/V, auto (the checkpoint's wish) or model "
        f"(the model dtype).  [env: {ENV_KV_CACHE_DTYPE}]",
        rich_help_panel=KV_PANEL,
    ),
]
SkipLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-dtype-skip-layers",
        metavar="L,..",
        help="Layers that store the model dtype: 0,1,-1,4-7,re:PATTERN,sliding_window,full.",
        rich_help_panel=KV_PANEL,
    ),
]
Rules = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache-rule",
        metavar="L,..:F",
        help="Format for some layers, such as 0-3:bf16 or full:k=fp8; may be repeated.",
        rich_help_panel=KV_PANEL,
    ),
]
Policy = Annotated[
    Path | None,
    typer.Option(
        "--kv-cache-policy",
        metavar="FILE",
        help="YAML file with kv_cache_dtype, skip_layers and rules.",
        rich_help_panel=KV_PANEL,
    ),
]
MissingScales = Annotated[
    str,
    typer.Option(
        "--kv-missing-scales",
        metavar="error|one",
        help="What to do where the checkpoint promises scales that are not there.",
        rich_help_panel=KV_PANEL,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="A checkpoint's wish that cannot be served is an error, not a downgrade.",
        rich_help_panel=KV_PANEL,
    ),
]
PageSize = Annotated[
    int,
    typer.Option(
        "--page-size",
        "--block-size",
        min=1,
        max=256,
        help="Tokens a page.",
        rich_help_panel=KV_PANEL,
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="D", help="Dtype to compute in; auto is the config's.")
]
Backend = Annotated[
    str, typer.Option("--attention-backend", metavar="B", help="auto, or one backend by name.")
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Each answer is bitwise the same alone or in any batch, with any chunking, caching or "
        "preemption; slower.",
    ),
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a hub model.")
]
Speculative = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='Drafter: {"method":"dflash","model":..,"num_speculative_tokens":..,"kv_cache_dtype":..}.',
    ),
]
CalculateScales = Annotated[bool, typer.Option("--calculate-kv-scales", hidden=True)]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel-size", "-tp", hidden=True, min=1)]


def requests_from(
    kv_cache_dtype: str | None,
    skip_layers: Sequence[str] | None = None,
    rules: Sequence[str] | None = None,
    policy: Path | None = None,
    *,
    strict: bool = False,
    missing_scales: str = "error",
) -> Requests:
    """Flags over environment over policy file; each keeps who asked."""
    return kv_requests(
        kv_cache_dtype=kv_cache_dtype,
        skip_layers=skip_layers or (),
        rules=rules or (),
        policy=policy,
        missing_scales=missing_scales,
        strict=strict,
        label=flag_and_value,
    )


_DEVICES = {
    "cuda": DeviceFacts(DeviceKind.CUDA, "sm_90"),
    "sm_80": DeviceFacts(DeviceKind.CUDA, "sm_80"),
    "sm_90": DeviceFacts(DeviceKind.CUDA, "sm_90"),
    "sm_100": DeviceFacts(DeviceKind.CUDA, "sm_100"),
    "gfx942": DeviceFacts(DeviceKind.ROCM, "gfx942"),
}


def device_from(text: str) -> DeviceFacts:
    """The device to plan for; it need not be present."""
    if text == "cpu":
        return DeviceFacts(DeviceKind.CPU, has_bf16=host_cpu_has_bf16())
    if text not in _DEVICES:
        raise UnknownName("device", text, ("cpu", *_DEVICES), asked_by="--device")
    return _DEVICES[text]
