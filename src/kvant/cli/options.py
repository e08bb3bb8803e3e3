"""Flags that several commands share, and the one place where they become typed requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import UnknownName
from kvant.kv.dtype import ComputeDtype
from kvant.kv.names import parse_compute_dtype, parse_format
from kvant.kv.policy import read_policy
from kvant.kv.request import Asked, KVRequest, Requests, parse_rule, parse_skips
from kvant.models.geometry.compute_dtype import host_cpu_has_bf16

KV_PANEL = "KV cache"
ENV_DTYPE = "KVANT_KV_CACHE_DTYPE"

KVCacheDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="F|K/V",
        help="Format of the KV cache: a name, K/V, auto (the checkpoint's wish) or model "
        f"(the model dtype).  [env: {ENV_DTYPE}]",
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
    if missing_scales not in ("error", "one"):
        raise UnknownName("value", missing_scales, ("error", "one"), asked_by="--kv-missing-scales")
    found = Requests(
        target=KVRequest(
            explicit=(*_global("--kv-cache-dtype", kv_cache_dtype),),
            strict=strict,
            missing_scales_as_one=missing_scales == "one",
        )
    )
    for text in skip_layers or ():
        found = found.merged(parse_skips(text, asked_by=f"--kv-cache-dtype-skip-layers {text}"))
    for text in rules or ():
        found = found.merged(parse_rule(text, asked_by=f"--kv-cache-rule {text}"))
    environment = KVRequest(explicit=(*_global(ENV_DTYPE, os.environ.get(ENV_DTYPE)),))
    found = found.merged(Requests(target=environment))
    return found if policy is None else found.merged(read_policy(policy))


def _global(name: str, text: str | None) -> tuple[Asked, ...]:
    if text is None:
        return ()
    asked_by = f"{name} {text}"
    return (Asked(parse_format(text, asked_by=asked_by), asked_by),)


def compute_dtype_from(text: str) -> ComputeDtype | None:
    """None for `auto`."""
    return None if text == "auto" else parse_compute_dtype(text, asked_by="--dtype")


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
