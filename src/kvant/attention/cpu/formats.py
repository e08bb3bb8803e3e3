"""Which encoding, scaling and writer each format is made of: a format's one line in this backend.

Without torch or numba: planning asks this table whether there are kernels for a format.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvant.attention.cpu.layout import E4M3_FACTOR, Code, Form, Scaling
from kvant.kv.dtype import KVDtype


@dataclass(frozen=True, slots=True)
class Kernels:
    """factor: what a decoded number must be multiplied with. rotated: codes are of rotated rows."""

    code: Code
    scaling: Scaling
    form: Form
    factor: float = 1.0
    rotated: bool = False


KERNELS: dict[KVDtype, Kernels] = {
    KVDtype.FLOAT32: Kernels(Code.FLOAT32, Scaling.NONE, Form.FLOAT32),
    KVDtype.FLOAT16: Kernels(Code.FLOAT16, Scaling.NONE, Form.FLOAT16),
    KVDtype.BFLOAT16: Kernels(Code.BFLOAT16, Scaling.NONE, Form.BFLOAT16),
    KVDtype.FP8_E4M3: Kernels(Code.E4M3, Scaling.NONE, Form.E4M3, E4M3_FACTOR),
    KVDtype.FP8_E5M2: Kernels(Code.E5M2, Scaling.NONE, Form.E5M2),
    KVDtype.FP8_PER_TOKEN_HEAD: Kernels(Code.E4M3, Scaling.ROW, Form.E4M3_ROW, E4M3_FACTOR),
    KVDtype.INT8_PER_TOKEN_HEAD: Kernels(Code.INT8, Scaling.ROW, Form.INT8_ROW),
    KVDtype.INT4_PER_TOKEN_HEAD: Kernels(
        Code.UINT4, Scaling.ROW_ZERO_POINT, Form.INT4_ROW, rotated=True
    ),
    KVDtype.NVFP4: Kernels(Code.E2M1, Scaling.BLOCK, Form.NVFP4),
    KVDtype.TURBOQUANT_K8: Kernels(Code.E4M3, Scaling.NONE, Form.E4M3, E4M3_FACTOR),
    KVDtype.TURBOQUANT_K4: Kernels(Code.CODEBOOK4, Scaling.ROW_HALF, Form.CODEBOOK4, rotated=True),
    KVDtype.TURBOQUANT_K3: Kernels(Code.CODEBOOK3, Scaling.ROW_HALF, Form.CODEBOOK3, rotated=True),
    KVDtype.TURBOQUANT_V4: Kernels(Code.UINT4, Scaling.ROW_HALF_OFFSET, Form.SMALLEST4),
    KVDtype.TURBOQUANT_V3: Kernels(Code.UINT3, Scaling.ROW_HALF_OFFSET, Form.SMALLEST3),
}
