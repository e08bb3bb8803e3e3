"""normal2: rotated rows in four equal steps, a float16 scale per row."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import divide
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.formats.turboquant_k import (
    normalised,
    product,
    store_scaled,
    sum_in_pairs,
)
from kvant.attention.triton.words import decode_uint2, load_half_scale
from kvant.kv.codecs import normal2
from kvant.kv.format import KVFormat

BOUND = tl.constexpr(normal2.BOUND)


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    z, root, unit, broken = normalised(x, HEAD, PAD, ROWS, PTX)
    size = tl.abs(z)
    is_outer = size > BOUND
    code = tl.where(z < 0, 1 - is_outer.to(tl.int32), 2 + is_outer.to(tl.int32))
    sums = sum_in_pairs(product(size, tl.where(is_outer, 3.0, 1.0), PTX), ROWS, PAD)
    wide = tl.sqrt_rn(tl.full((), HEAD, tl.float32))
    scale = divide(root * wide * 2.0, tl.where(root == 0, 1.0, sums), PTX) * unit
    store_scaled(codes, scales, there, code, scale, broken, HEAD, PAD, ROWS, 2)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(
        decode_uint2, encode, row_scale=load_half_scale, factor=2.0**22, bias=normal2.BIAS, even=4.0
    )
