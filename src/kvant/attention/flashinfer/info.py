"""What the FlashInfer backend serves, without torch or flashinfer."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from kvant.attention.need import BackendInfo, DeviceKind, Need
from kvant.attention.triton.info import INFO as TRITON
from kvant.kv.dtype import ComputeDtype

_ARCHS = ("sm_90", "sm_90a")
_HEAD_SIZES = (64, 128, 256)


def refuse(need: Need) -> str | None:
    """Returns why it cannot serve a layer; it serves 16-bit K and V in the model's dtype on Hopper."""
    layer, device = need.layer, need.device
    if device.kind is not DeviceKind.CUDA:
        return "FlashInfer's kernels run on NVIDIA GPUs"
    if device.arch not in _ARCHS:
        return f"it is verified on sm_90 alone, not on {device.arch or 'an unknown GPU'}"
    if need.v is None:
        return "it reads keys and values, and this layer keeps latents (MLA)"
    if need.compute not in (ComputeDtype.FLOAT16, ComputeDtype.BFLOAT16):
        return f"its kernels compute in 16 bits, not in {need.compute.value}"
    if need.k is not need.compute.kv_dtype or need.v is not need.compute.kv_dtype:
        return f"it serves keys and values stored in the model's {need.compute.value}; others are Triton's"
    if layer.head_dim_k != layer.head_dim_v or layer.head_dim_k not in _HEAD_SIZES:
        sizes = ", ".join(map(str, _HEAD_SIZES))
        return f"its head sizes are {sizes}, for K and V alike, not {layer.head_dim_k}/{layer.head_dim_v}"
    if layer.sinks:
        return "its kernels have no attention sinks"
    if layer.window is not None and not layer.causal:
        return "its windows look back only, and a bidirectional layer's look ahead too"
    return TRITON.refuse(need) or _refuse_package()


def _refuse_package() -> str | None:
    """Returns why its kernels are missing: they are compiled on first use unless a package has them."""
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return None
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if shutil.which("nvcc") is None and not (cuda / "bin" / "nvcc").exists():
        return "its kernels are compiled at start: there is no nvcc, nor the package flashinfer-jit-cache"
    if shutil.which("ninja") is None:
        return "its kernels are compiled at start, and there is no ninja"
    return None


INFO = BackendInfo("flashinfer", "kvant.attention.flashinfer.backend", refuse)
