"""turboquant_v4 and turboquant_v3: steps from the row's smallest number on, float16 scale and minimum."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import (
    NAN_HALF,
    bound,
    divide,
    half,
    has_nan,
    nearest,
    store_packed,
    widen,
)
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.words import decode_uint4, float16_of
from kvant.kv.format import KVFormat


@triton.jit
def decode_uint3(x, PTX: tl.constexpr):
    """Decodes integers 0..7 to float16 subnormals: n * 2^-21 at odd places of a word, else n * 2^-24."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 p, q, r, s; prmt.b32 p, $8, $9, 0x5410; prmt.b32 r, $8, $9, 0x6521;
            shr.u32 q, p, 6; shr.u32 s, r, 10; shr.u32 r, r, 4;
            and.b32 $0, p, 0x00070007; and.b32 $1, p, 0x00380038;
            and.b32 $2, q, 0x00070007; and.b32 $3, q, 0x00380038;
            and.b32 $4, r, 0x00070007; and.b32 $5, r, 0x00380038;
            and.b32 $6, s, 0x00070007; and.b32 $7, s, 0x00380038; }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                   tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    parts = ()
    for i in tl.static_range(4):
        parts = parts + (float16_of((x >> (6 * i)) & 0x7), float16_of((x >> (6 * i)) & 0x38))
    return parts


@triton.jit
def load_scale_and_minimum(pointer, there):
    """Loads scale and minimum of rows, float32 [rows] each; pointer: the scale plane as int32."""
    bits = tl.load(pointer, mask=there, other=0)
    return float16_of(bits & 0xFFFF).to(tl.float32), float16_of(bits >> 16).to(tl.float32)


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    BITS: tl.constexpr = FORMAT.bits
    STEPS: tl.constexpr = (1 << BITS) - 1
    inside = (tl.arange(0, PAD) < HEAD)[None, :]
    broken = has_nan(x)
    y = tl.where(broken[:, None], 0.0, widen(x))
    low = half(tl.min(tl.where(inside, y, float("inf")), 1))
    start = low.to(tl.float32)
    span = tl.max(tl.where(inside, y, float("-inf")), 1) - start
    span = tl.where(span > 0, span, 0.0)
    scale = half(divide(span, tl.full((ROWS,), STEPS, tl.float32), PTX))
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    code = divide(y - start[:, None], step[:, None] + 0.0 * tl.zeros_like(y), PTX)
    code = nearest(bound(code, 0.0, STEPS * 1.0)).to(tl.int32)
    code = tl.where((scale == 0.0)[:, None], 0, code)
    store_packed(codes, there, code, HEAD, ROWS, PAD, BITS)
    scale = tl.where(broken, NAN_HALF, scale.to(tl.int16, bitcast=True))
    tl.store(scales, scale.to(tl.int16), mask=there)
    tl.store(scales + 1, low.to(tl.int16, bitcast=True), mask=there)


def kernels(declared: KVFormat) -> Kernels:
    four = declared.bits == 4
    return Kernels(
        decode_uint4 if four else decode_uint3,
        encode,
        row_scale=load_scale_and_minimum,
        factor=2.0**20 if four else 2.0**21,
        even=16.0 if four else 8.0,
    )
