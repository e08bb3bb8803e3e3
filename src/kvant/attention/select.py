"""Asks every backend, at plan time, whether it writes and reads a layer; keeps every answer.

To add a backend, add one package under `kvant/attention/` with a torch-free `info.py`, and one line here.
"""

from __future__ import annotations

from dataclasses import replace

from kvant.attention.cpu.info import INFO as CPU
from kvant.attention.flashinfer.info import INFO as FLASHINFER
from kvant.attention.need import LONG, BackendInfo, DeviceFacts, DeviceKind, Need
from kvant.attention.reference.info import INFO as REFERENCE
from kvant.attention.triton.info import INFO as TRITON
from kvant.attention.triton_fp8.info import INFO as TRITON_FP8
from kvant.errors import UnknownName
from kvant.kv.dtype import KVDtype
from kvant.kv.geometry import Attention
from kvant.kv.resolve import Served
from kvant.kv.spec import KVPlan, Rejected

BACKENDS: tuple[BackendInfo, ...] = (FLASHINFER, TRITON_FP8, TRITON, CPU, REFERENCE)
"""Every backend, fastest first: the first that does not refuse serves the layer."""


def parse_backend(text: str | None, *, asked_by: str) -> BackendInfo | None:
    """Returns the backend with this name; None for None or "auto". Raises UnknownName."""
    if text is None or text == "auto":
        return None
    for info in BACKENDS:
        if info.name == text:
            return info
    raise UnknownName("attention backend", text, [i.name for i in BACKENDS], asked_by=asked_by)


def select(need: Need, *, only: BackendInfo | None = None) -> Served:
    """Returns the first backend that serves this layer. only: the backend that the user named."""
    rejected: list[Rejected] = []
    for info in BACKENDS:
        if only is not None and info != only:
            rejected.append(Rejected(info.name, f"--attention-backend {only.name} was asked for"))
            continue
        reason = refusal(need, info)
        if reason is None and only is None:
            reason = by_name_only(need, info)
        if reason is None:
            return Served(True, info.name, tuple(rejected))
        rejected.append(Rejected(info.name, reason))
    return Served(False, None, tuple(rejected))


def refusal(need: Need, info: BackendInfo) -> str | None:
    """Returns why this backend cannot serve this layer; None if it can."""
    return (
        _refuse_formats(need)
        or _refuse_mode(need, info)
        or info.refuse(need)
        or _refuse_wide(need, info)
    )


def allow(need: Need, *, not_runnable: str) -> Served:
    """Checks the formats' own limits, without a backend, for a model that can only be planned."""
    reason = _refuse_formats(need)
    rejected = tuple(Rejected(info.name, reason or not_runnable) for info in BACKENDS)
    return Served(reason is None, None, rejected)


def slow_layers(plan: KVPlan) -> tuple[str, ...]:
    """Returns why layers use the reference backend on a CPU, one line per reason."""
    found: dict[str, list[int]] = {}
    for layer in plan.layers:
        if layer.backend == REFERENCE.name:
            for rejected in layer.rejected:
                if rejected.backend == CPU.name:
                    found.setdefault(rejected.reason, []).append(layer.geometry.index)
    return tuple(
        f"attention in {len(layers)} of {len(plan.layers)} layers is left to the reference backend, "
        f"which is slow; {CPU.name}: {reason}"
        for reason, layers in found.items()
    )


def rounded_layers(plan: KVPlan) -> tuple[str, ...]:
    """Returns which layers compute long prompts in fewer bits, one line per backend."""
    backends = [layer.backend for layer in plan.layers]
    return tuple(
        f"attention in {backends.count(info.name)} of {len(backends)} layers goes through {info.name}: "
        f"where a step that is not recorded has {LONG} tokens of a prompt or more, queries and probabilities "
        "are rounded to four significant bits (fp8)"
        for info in BACKENDS
        if info.rounds_long and info.name in backends
    )


def by_name_only(need: Need, info: BackendInfo) -> str | None:
    """Returns why a backend that could serve is used only by name, or None."""
    if info is REFERENCE and _is_gpu(need.device):
        return f"on a GPU it is chosen by name only: --attention-backend {info.name}"
    if info is FLASHINFER:
        return (
            "its kernels are compiled for minutes at its first start, so it is chosen by name only: "
            f"--attention-backend {info.name}"
        )
    if info.rounds_long:
        return (
            "it rounds queries and probabilities of long prompts to four significant bits, so it is chosen "
            f"by name only: --attention-backend {info.name}"
        )
    return None


def _is_gpu(device: DeviceFacts) -> bool:
    return device.kind is not DeviceKind.CPU


def _refuse_mode(need: Need, info: BackendInfo) -> str | None:
    if need.batch_invariant and not info.batch_invariant:
        return "its results depend on the batch, and --batch-invariant was asked for"
    return None


def _refuse_wide(need: Need, info: BackendInfo) -> str | None:
    """Returns why a backend cannot read the layer's wide rows beside its other rows, or None."""
    wide = need.wide
    if wide is None:
        return None
    if not info.wide_rows:
        return f"its kernels read one form of a row, and the {wide} are asked for"
    own_k, own_v = need.k, need.v
    k, v = own_k if wide.k is None else wide.k.dtype, own_v if wide.v is None else wide.v.dtype
    alone = replace(need, k=k, v=v, wide=None)
    reason = refusal(alone, info)
    return None if reason is None else f"wide rows: {reason}"


def _refuse_formats(need: Need) -> str | None:
    """Returns why a format excludes every backend, or None."""
    k = need.k.format
    if need.layer.attention is Attention.MLA and k.bits < 8:
        return "every head is computed from a latent, which takes 8 bits or more"
    reason = k.refuse_head_dim(need.layer.head_dim_k)
    if reason is None and need.v is not None:
        reason = need.v.format.refuse_head_dim(need.layer.head_dim_v)
    return reason


def device_encodings(device: DeviceFacts) -> dict[KVDtype, tuple[KVDtype, str]]:
    """Returns formats that a device stores in another encoding, with the phrase that says so."""
    if device.kind is DeviceKind.ROCM and device.arch == "gfx942":
        return {KVDtype.FP8_E4M3: (KVDtype.FP8_E4M3FNUZ, "gfx942 encodes e4m3 as e4m3fnuz")}
    return {}
