"""Which layers the Triton kernels serve; imports neither torch nor triton."""

from __future__ import annotations

from kvant.attention.need import BackendInfo, DeviceKind, Need
from kvant.attention.triton.formats import SERVED
from kvant.kv.dtype import ComputeDtype
from kvant.kv.format import Packing
from kvant.kv.geometry import Attention

_OLDEST_NVIDIA = 80
_AMD = ("gfx90a", "gfx942", "gfx950")
_LARGEST_HEAD = 512
_IN_BITS = 32


def refuse(need: Need) -> str | None:
    """Returns why the Triton kernels cannot serve this layer, or None.

    They serve every pair of formats on NVIDIA GPUs from sm_80 on and on AMD CDNA, with head sizes up to 512.
    """
    layer = need.layer
    if layer.attention is Attention.MLA or need.v is None:
        return _refuse_device(need) or _refuse_latent(need)
    if layer.num_kv_heads < 1 or layer.num_q_heads % layer.num_kv_heads:
        return f"{layer.num_q_heads} query heads do not share {layer.num_kv_heads} KV heads evenly"
    reason = need.k.format.refuse_head_dim(layer.head_dim_k) or need.v.format.refuse_head_dim(
        layer.head_dim_v
    )
    if reason is not None:
        return reason
    if max(layer.head_dim_k, layer.head_dim_v) > _LARGEST_HEAD:
        return f"head sizes end at {_LARGEST_HEAD}, not {max(layer.head_dim_k, layer.head_dim_v)}"
    return _refuse_arithmetic(need) or _refuse_device(need) or _refuse_formats(need)


def _refuse_latent(need: Need) -> str | None:
    layer = need.layer
    rotary = layer.head_dim_k - layer.head_dim_v
    if (
        layer.num_kv_heads != 1
        or not 0 < layer.head_dim_v <= _LARGEST_HEAD
        or not 0 < rotary <= 128
    ):
        return (
            f"latents have up to {_LARGEST_HEAD} numbers, rotary keys up to 128, and both one head"
        )
    if layer.head_dim_v % 2 or rotary % 2:
        return "latents and rotary keys are read in pairs of numbers"
    if not layer.causal or layer.window is not None or layer.sinks or layer.softcap:
        return "the kernel for latents is causal, without windows, soft caps and sinks"
    return _refuse_arithmetic(need) or _refuse_formats(need)


def _refuse_arithmetic(need: Need) -> str | None:
    if need.page_size < 1 or need.page_size & (need.page_size - 1):
        return f"pages are a power of two of tokens, not {need.page_size}"
    if need.compute is ComputeDtype.FLOAT64:
        return "the kernels compute in float32 at most; float64 is the reference backend's"
    return None


def _refuse_device(need: Need) -> str | None:
    device = need.device
    if device.kind is DeviceKind.CPU:
        return "Triton compiles for GPUs only"
    if device.kind is DeviceKind.CUDA:
        if device.capability < _OLDEST_NVIDIA:
            return f"the kernels need sm_{_OLDEST_NVIDIA} or later, not {device.arch or 'unknown'}"
        return None
    if device.arch not in _AMD:
        return f"the kernels are written for {', '.join(_AMD)}, not {device.arch or 'unknown'}"
    return None


def _refuse_formats(need: Need) -> str | None:
    for dtype in (need.k, need.v):
        if dtype is not None and dtype not in SERVED:
            return f"no kernels for {dtype}"
    layer = need.layer
    for dtype, head_dim in ((need.k, layer.head_dim_k), (need.v, layer.head_dim_v)):
        if dtype is None:
            continue
        if dtype.format.packing is Packing.BITS and head_dim % _IN_BITS:
            bits = dtype.format.bits
            return f"rows of {bits} bits are read in units of 4 bytes: {_IN_BITS} must divide {head_dim}"
        rows = layer.num_kv_heads * need.page_size
        if any(plane.row_bytes * rows % 4 for plane in dtype.format.planes(head_dim)):
            return f"pages are cleared 4 bytes at a time, which those of {dtype} are not: larger ones are"
        if dtype.format.device_only not in ("", need.device.arch):
            return f"{dtype} is the encoding of {dtype.format.device_only} alone"
    return None


INFO = BackendInfo(
    "triton",
    "kvant.attention.triton.backend",
    refuse,
    batch_invariant=True,
    package="triton",
    wide_rows=True,
)
