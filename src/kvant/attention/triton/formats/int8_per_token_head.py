"""int8_per_token_head: integers in units of a float32 scale per row."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import ROUND, bound, scale_rows, store_bytes
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.words import float16_of, load_row_scale
from kvant.kv.format import Encoding, KVFormat

LARGEST = tl.constexpr(Encoding.INT8.largest)


@triton.jit
def decode(x, PTX: tl.constexpr):
    """Decodes n to the float16 subnormal (n + 128) * 2^-24."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; lop3.b32 $0, $2, 0x00800080, 0x00ff00ff, 0x28;
            shr.u32 t, $2, 8; lop3.b32 $1, t, 0x00800080, 0x00ff00ff, 0x28; }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return (float16_of((x & 0xFF) ^ 0x80), float16_of(((x >> 8) & 0xFF) ^ 0x80))


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    y, _ = scale_rows(x, scales, there, LARGEST, PTX)
    # The lowest bits of this sum are the nearest integer.
    code = (bound(y, -LARGEST, LARGEST) + ROUND).to(tl.int32, bitcast=True)
    store_bytes(codes, there, code, HEAD, PAD)


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(decode, encode, row_scale=load_row_scale, factor=2.0**24, bias=128.0)
