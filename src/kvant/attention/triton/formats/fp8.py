"""fp8_e4m3, fp8_e4m3fnuz, fp8_e5m2 and turboquant_k8: 8-bit floats with an outside scale or none."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import divide, store_bytes, widen
from kvant.attention.triton.float8 import decode_e4m3, decode_e4m3fnuz, decode_e5m2, float8_code
from kvant.attention.triton.format import Kernels
from kvant.kv.format import Encoding, KVFormat

_DECODE = {
    Encoding.E4M3FN: decode_e4m3,
    Encoding.E4M3FNUZ: decode_e4m3fnuz,
    Encoding.E5M2: decode_e5m2,
}


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    y = widen(x)
    if OUTER > 0:
        scale = tl.load(outer + head * (OUTER - 1))
        y = divide(y, scale[:, None] + 0.0 * tl.zeros_like(y), PTX)
    store_bytes(codes, there, float8_code(y, FORMAT), HEAD, PAD)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(_DECODE[declared.encoding], encode)
