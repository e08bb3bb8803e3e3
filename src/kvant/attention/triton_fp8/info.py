"""Which layers the Triton backend with fp8 products serves, without torch or triton.

Its results differ from every other backend's, so it is used only by name. In `Step.long` it rounds
queries and probabilities to the four significant bits of e4m3 (`verify/rounded.py` is the definition).
"""

from __future__ import annotations

from kvant.attention.need import BackendInfo, DeviceKind, Need
from kvant.attention.triton.info import INFO as TRITON
from kvant.kv.dtype import ComputeDtype, KVDtype

_ARCHS = ("sm_90", "sm_90a")
_HEAD_SIZES = (64, 128)
SERVED = (KVDtype.FP8_E4M3, KVDtype.FP8_E5M2, KVDtype.FP8_PER_TOKEN_HEAD)
"""Formats whose stored codes are operands of the tensor cores, for K and V in any pair."""


def refuse(need: Need) -> str | None:
    """Returns why it cannot serve a layer.

    It serves 8-bit floats on Hopper, heads of 64 and 128, no extras.
    """
    layer, device = need.layer, need.device
    if device.kind is not DeviceKind.CUDA or device.arch not in _ARCHS:
        return f"its products are those of sm_90's tensor cores, not of {device.arch or 'a CPU'}"
    if need.v is None:
        return "its kernel reads keys and values, and this layer keeps latents (MLA)"
    for dtype in (need.k, need.v):
        if dtype not in SERVED:
            names = ", ".join(map(str, SERVED))
            return f"stored codes are multiplied as they are, which {names} can be, not {dtype}"
    if need.compute not in (ComputeDtype.FLOAT16, ComputeDtype.BFLOAT16):
        return f"queries come and results go in 16 bits, not in {need.compute.value}"
    if layer.head_dim_k != layer.head_dim_v or layer.head_dim_k not in _HEAD_SIZES:
        sizes = " and ".join(map(str, _HEAD_SIZES))
        return f"its head sizes are {sizes}, for K and V alike, not {layer.head_dim_k}/{layer.head_dim_v}"
    if layer.window is not None:
        return f"its kernel has no windows, and this layer's is {layer.window}"
    if layer.softcap:
        return f"its kernel has no soft cap, and this layer's is {layer.softcap:g}"
    if layer.sinks:
        return "its kernel has no attention sinks"
    return TRITON.refuse(need)


INFO = BackendInfo(
    "triton_fp8",
    "kvant.attention.triton_fp8.backend",
    refuse,
    rounds_long=True,
    package=TRITON.package,
)
