"""Which layers the CPU kernels serve; imports neither torch nor numba."""

from __future__ import annotations

import importlib.util

from kvant.attention.cpu.formats import SERVED
from kvant.attention.need import BackendInfo, DeviceFacts, DeviceKind, Need
from kvant.kv.dtype import ComputeDtype
from kvant.kv.format import Packing
from kvant.kv.geometry import Attention

_LARGEST_HEAD = 512
_LANES = 16


def refuse(need: Need) -> str | None:
    """Returns why the CPU kernels cannot serve this layer, or None.

    They serve every pair of formats except encodings of other devices, and head sizes that are multiples of
    16 up to 512.
    """
    layer = need.layer
    if need.device.kind is not DeviceKind.CPU:
        return "its kernels run on CPUs"
    if layer.attention is Attention.MLA or need.v is None:
        return "its kernels read keys and values, and this layer keeps latents (MLA)"
    if layer.num_kv_heads < 1 or layer.num_q_heads % layer.num_kv_heads:
        return f"{layer.num_q_heads} query heads do not share {layer.num_kv_heads} KV heads evenly"
    for dtype in (need.k, need.v):
        if dtype not in SERVED:
            return f"no kernels for {dtype}"
    if need.compute is ComputeDtype.FLOAT64:
        return "its kernels compute in float32; float64 is the reference backend's"
    for dtype, head_dim in ((need.k, layer.head_dim_k), (need.v, layer.head_dim_v)):
        reason = dtype.format.refuse_head_dim(head_dim)
        if reason is not None:
            return reason
        multiple = 2 * _LANES if dtype.format.packing is Packing.BITS else _LANES
        if head_dim % multiple or not 0 < head_dim <= _LARGEST_HEAD:
            return f"head sizes of {dtype} are multiples of {multiple} up to {_LARGEST_HEAD}, not {head_dim}"
    return refuse_host(need.device)


def refuse_host(device: DeviceFacts) -> str | None:
    """Returns why kernels that numba compiles do not run on this CPU, or None."""
    if not device.has_avx2:
        return "its kernels need a CPU with AVX2"
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    return None


INFO = BackendInfo(
    "cpu", "kvant.attention.cpu.backend", refuse, batch_invariant=True, wide_rows=True
)
