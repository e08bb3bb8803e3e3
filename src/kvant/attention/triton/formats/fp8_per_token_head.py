"""fp8_per_token_head: e4m3 in units of a float32 scale per row."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import scale_rows, store_bytes
from kvant.attention.triton.float8 import decode_e4m3, float8_code
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.words import load_row_scale
from kvant.kv.format import KVFormat


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    y, broken = scale_rows(x, scales, there, FORMAT.float8.max, PTX)
    code = tl.where(broken[:, None], FORMAT.float8.nan_code, float8_code(y, FORMAT))
    store_bytes(codes, there, code, HEAD, PAD)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(decode_e4m3, encode, row_scale=load_row_scale)
