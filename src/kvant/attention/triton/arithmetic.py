"""Arithmetic of encoders: follows the definitions in `kvant.kv.codecs`, step by step, to the byte.

Everything is float32 and integer arithmetic on bits. No hardware conversion to 8 bits is used, so the
same code runs on every device and in Triton's interpreter. Division is IEEE division: Triton's own may
flush subnormals, so on NVIDIA it is one PTX instruction. Rows x are [ROWS, PAD], zero from column HEAD on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.kv import codecs
from kvant.kv.codecs.conversion import MIN_ROW_SCALE
from kvant.kv.format import Encoding

CLAMP = tl.constexpr(codecs.CLAMP)
LEAST = tl.constexpr(MIN_ROW_SCALE)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to integers
NAN_BITS = tl.constexpr(0x7FC00000)
NAN_HALF = tl.constexpr(0x7E00)
LARGEST_HALF = tl.constexpr(Encoding.FLOAT16.largest)


@triton.jit
def divide(a, b, PTX: tl.constexpr):
    """Returns a / b in float32, correctly rounded."""
    if PTX:
        a, b = tl.broadcast(a, b)
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(a, b)


@triton.jit
def _fused(a, b, c):
    """Returns a * b + c in float32, rounded once."""
    a, b = tl.broadcast(a, b)
    return tl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def divide_rows(x, scale, PTX: tl.constexpr):
    """Returns x [ROWS, PAD] / scale [ROWS] in float32, correctly rounded, for scales of at least LEAST.

    PTX's division branches for every number. Here a row has one reciprocal, and each quotient two
    corrections, the second of which is exact (P. Markstein, "Computation of elementary functions on the IBM
    RISC System/6000 processor", 1990). Small rows are scaled, so that remainders are not subnormal.
    """
    if PTX:
        up = tl.where(scale < 2.0**-60, 2.0**64, 1.0)
        divisor = scale * up
        inverse = divide(1.0 + 0.0 * divisor, divisor, PTX)[:, None]
        x = x * up[:, None]
        divisor = 0.0 - divisor[:, None]
        y = x * inverse
        y = _fused(_fused(y, divisor, x), inverse, y)
        return _fused(_fused(y, divisor, x), inverse, y)
    else:
        return tl.div_rn(x, scale[:, None] + 0.0 * tl.zeros_like(x))


@triton.jit
def multiply(a, b, PTX: tl.constexpr):
    """Returns a * b in float32, rounded: the compiler does not fuse it with an addition."""
    if PTX:
        a, b = tl.broadcast(a, b)
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def nearest(x):
    """Returns the nearest integer, ties to even, for magnitudes below 2^22."""
    return (x + ROUND) - ROUND


@triton.jit
def bound(x, low, high):
    """Clamps x to [low, high]; NaN stays NaN."""
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def widen(x):
    """Returns x as float32, clamped to the bounds of the definitions; NaN stays NaN."""
    return bound(x.to(tl.float32), -CLAMP, CLAMP)


@triton.jit
def bfloat16(x):
    """Converts float32 to bfloat16: nearest, ties to even, saturating; NaN becomes 0x7fc0."""
    LARGEST: tl.constexpr = 3.3895313892515355e38
    bits = bound(x, -LARGEST, LARGEST).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    bits = tl.where(x != x, 0x7FC0, bits)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def has_nan(x):
    """Returns True for rows of x [rows, columns] that hold NaN."""
    return tl.max((x != x).to(tl.int32), 1) > 0


@triton.jit
def row_scale(span, steps, PTX: tl.constexpr):
    """Returns span / steps, at least LEAST, for rows without NaN."""
    scale = divide(span, steps + 0.0 * span, PTX)
    return tl.where(scale < LEAST, LEAST, scale)


@triton.jit
def pack_nibbles(code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Packs 4-bit codes [ROWS, COLUMNS] into bytes [ROWS, COLUMNS / 2], in their integer type."""
    low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
    return low | (high << 4)


@triton.jit
def pack_threes(code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Packs 3-bit codes, eight in one number of 24 bits: [ROWS, COLUMNS / 8]."""
    eights = tl.reshape(code, (ROWS, COLUMNS // 8, 8))
    return tl.sum(eights << (3 * tl.arange(0, 8))[None, None, :], 2)


@triton.jit
def half(x):
    """Converts float32 without NaN to float16: nearest, saturating; never -0."""
    x = bound(x, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    return tl.where(x == 0.0, 0.0, x).to(tl.float16)


@triton.jit
def scale_rows(x, scales, there, STEPS: tl.constexpr, PTX: tl.constexpr):
    """Divides rows x [ROWS, PAD] by a scale per row, and stores the scales. Returns rows, and has-NaN [ROWS].

    A row's largest magnitude becomes STEPS. Rows with NaN become zeros and get the scale NaN.
    """
    broken = has_nan(x)
    y = tl.where(broken[:, None], 0.0, widen(x))
    scale = row_scale(tl.max(tl.abs(y), 1), STEPS, PTX)
    y = divide_rows(y, scale, PTX)
    bits = tl.where(broken, NAN_BITS, scale.to(tl.int32, bitcast=True))
    tl.store(scales, bits, mask=there)
    return y, broken


@triton.jit
def store_bytes(codes, there, code, HEAD: tl.constexpr, PAD: tl.constexpr):
    """Stores 8-bit codes [ROWS, PAD] in rows of HEAD bytes."""
    c = tl.arange(0, PAD)
    mask = there[:, None] & (c < HEAD)[None, :]
    tl.store(codes[:, None] + c[None, :], code.to(tl.uint8), mask=mask)


@triton.jit
def store_packed(
    codes, there, code, HEAD: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Stores codes [ROWS, PAD] of 2 to 4 bits in rows of HEAD codes."""
    if BITS == 2:
        fours = tl.reshape(code, (ROWS, PAD // 4, 4))
        packed = tl.sum(fours << (2 * tl.arange(0, 4))[None, None, :], 2)
        b = tl.arange(0, PAD // 4)
        tl.store(codes[:, None] + b[None, :], packed.to(tl.uint8),
                 mask=there[:, None] & (b < HEAD // 4)[None, :])  # fmt: skip
    elif BITS == 4:
        packed = pack_nibbles(code, ROWS, PAD)
        b = tl.arange(0, PAD // 2)
        tl.store(codes[:, None] + b[None, :], packed.to(tl.uint8),
                 mask=there[:, None] & (b < HEAD // 2)[None, :])  # fmt: skip
    else:
        packed = pack_threes(code, ROWS, PAD)
        b = tl.arange(0, PAD // 8)
        mask = there[:, None] & (b < HEAD // 8)[None, :]
        at = codes[:, None] + 3 * b[None, :]
        for i in tl.static_range(3):
            tl.store(at + i, ((packed >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)
