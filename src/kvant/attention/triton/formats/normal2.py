"""normal2: rotated rows in four equal steps, a float16 scale per row."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.format import Kernels
from kvant.attention.triton.formats.turboquant_k import normalised, store_normal
from kvant.attention.triton.words import decode_uint2, load_half_scale
from kvant.kv.codecs import normal2
from kvant.kv.format import KVFormat

BOUND = tl.constexpr(normal2.BOUND)
BIAS = tl.constexpr(normal2.BIAS)


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    z, root, unit, broken = normalised(x, HEAD, PAD, ROWS, PTX)
    outer_step = (tl.abs(z) > BOUND).to(tl.int32)
    code = tl.where(z < 0, 1 - outer_step, 2 + outer_step)
    found = code.to(tl.float32) - BIAS
    store_normal(codes, scales, there, code, found, root, unit, broken, HEAD, PAD, ROWS, 2, PTX)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint2, encode, row_scale=load_half_scale, factor=2.0**22, bias=normal2.BIAS, even=4.0
    )
