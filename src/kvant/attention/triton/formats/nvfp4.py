"""nvfp4: e2m1 in units of an e4m3 scale per block of 16, and of one scale from outside the pages."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import (
    bound,
    divide,
    has_nan,
    nearest,
    store_packed,
    widen,
)
from kvant.attention.triton.float8 import e4m3_value, float8_code
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.words import float16_of
from kvant.kv.format import Encoding, KVFormat

LARGEST = tl.constexpr(Encoding.E2M1.largest)


@triton.jit
def decode(x, PTX: tl.constexpr):
    """Moves sign and exponent to their places in float16, which gives numbers times 2^-14."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, m;
            shl.b32 a, $4, 12; shl.b32 b, $4, 8; shl.b32 c, $4, 4;
            shl.b32 m, $4, 9; and.b32 m, m, 0x0e000e00; lop3.b32 $0, a, 0x80008000, m, 0xea;
            shl.b32 m, $4, 5; and.b32 m, m, 0x0e000e00; lop3.b32 $1, b, 0x80008000, m, 0xea;
            shl.b32 m, $4, 1; and.b32 m, m, 0x0e000e00; lop3.b32 $2, c, 0x80008000, m, 0xea;
            shr.u32 m, $4, 3; and.b32 m, m, 0x0e000e00; lop3.b32 $3, $4, 0x80008000, m, 0xea; }""",
            "=&r,=&r,=&r,=&r,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return (
        _e2m1_bits(x & 0xF),
        _e2m1_bits((x >> 4) & 0xF),
        _e2m1_bits((x >> 8) & 0xF),
        _e2m1_bits((x >> 12) & 0xF),
    )


@triton.jit
def _e2m1_bits(nibble):
    return float16_of(((nibble & 8) << 12) | ((nibble & 7) << 9))


@triton.jit
def block_scale(code, PTX: tl.constexpr):
    """Decodes e4m3 scale codes (uint8) to float16, times 2^7; products with decoded elements are exact."""
    if PTX:
        # Not marked pure, so that the compiler does not repeat it for every element of a block.
        return tl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .b32 c; mov.b32 {a, b}, $2; mov.b32 c, 0x58005800;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;
            mul.rn.f16x2 $0, $0, c; mul.rn.f16x2 $1, $1, c; }""",
            "=&r,=&r,r", [code], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return e4m3_value(code, False) * 128.0


@triton.jit
def _e2m1_code(x):
    """Encodes float32 without NaN to e2m1 codes 0..15 as int32."""
    size = tl.abs(x)
    halves = nearest(tl.minimum(size * 2.0, 4.0))
    ones = nearest(bound(size - 2.0, 0.0, 2.0))
    twos = nearest(bound((size - 4.0) * 0.5, 0.0, 1.0))
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return (halves + ones + twos).to(tl.int32) | sign


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    tl.static_assert(OUTER > 0)
    BLOCK: tl.constexpr = FORMAT.block
    BLOCKS: tl.constexpr = PAD // BLOCK
    outside = tl.load(outer + head * (OUTER - 1))
    outside = tl.broadcast_to(outside[:, None], (ROWS, BLOCKS))
    outside = tl.reshape(outside, (ROWS * BLOCKS,))
    blocks = tl.reshape(widen(x), (ROWS * BLOCKS, BLOCK))
    largest = tl.max(tl.abs(blocks), 1)
    broken = has_nan(blocks)
    largest = tl.where(broken, 0.0, largest)
    scale = divide(divide(largest, LARGEST + 0.0 * largest, PTX), outside + 0.0 * largest, PTX)
    scale = float8_code(scale, FORMAT)
    scale = tl.where((scale == 0) & (largest > 0), 1, scale)
    step = e4m3_value(scale, False).to(tl.float32) * outside
    empty = broken | (step == 0)
    steps = divide(blocks, tl.where(empty, 1.0, step)[:, None] + 0.0 * tl.abs(blocks), PTX)
    code = _e2m1_code(tl.where(empty[:, None], 0.0, steps))
    scale = tl.where(broken, FORMAT.float8.nan_code, scale)
    store_packed(codes, there, tl.reshape(code, (ROWS, PAD)), HEAD, ROWS, PAD, 4)
    s = tl.arange(0, BLOCKS)
    tl.store(scales[:, None] + s[None, :],
             tl.reshape(scale, (ROWS, BLOCKS)).to(tl.uint8),
             mask=there[:, None] & (s < HEAD // BLOCK)[None, :])  # fmt: skip


def kernels(declared: KVFormat) -> Kernels:
    return Kernels(decode, encode, block_scale=block_scale, factor=2.0**7)
