"""8-bit floats in kernels: converts codes to float16 and back; `kvant.kv.codecs.float8` defines them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.words import float16_of


@triton.jit
def e4m3_value(code, NUZ: tl.constexpr):
    """Decodes codes (any integer type, 0..255) to float16, exactly; NaN codes to NaN."""
    code = code.to(tl.int32)
    if NUZ:
        scale = 128.0
        bad = code == 0x80
    else:
        scale = 256.0
        bad = (code & 0x7F) == 0x7F
    # Sign and exponent precede the mantissa as in float16, which has one more exponent bit and another bias:
    # the difference is a power of two. Subnormal codes become float16 subnormals.
    value = float16_of(((code & 0x80) << 8) | ((code & 0x7F) << 7)) * scale
    return tl.where(bad, float("nan"), value).to(tl.float16)


# Inline PTX works on two neighbouring words in one register (pack=2).
@triton.jit
def decode_e4m3(x, PTX: tl.constexpr):
    """Decodes two codes per word, with the hardware's conversion (sm_89 and later) or on bits."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 lo, hi; .reg .b16 a, b, c, d;
            prmt.b32 lo, $2, 0, 0x4420; prmt.b32 hi, $2, 0, 0x4431;
            mov.b32 {a, b}, lo; mov.b32 {c, d}, hi;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, c; }""",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return (e4m3_value(x & 0xFF, False), e4m3_value((x >> 8) & 0xFF, False))


@triton.jit
def decode_e4m3fnuz(x, PTX: tl.constexpr):
    """Decodes two codes per word, on bits."""
    return (e4m3_value(x & 0xFF, True), e4m3_value((x >> 8) & 0xFF, True))


@triton.jit
def decode_e5m2(x, PTX: tl.constexpr):
    """Decodes two codes per word: a code is the upper half of a float16."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
            "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return (float16_of(x << 8), float16_of(x & -256))


@triton.jit
def float8_code(y, FORMAT: tl.constexpr):
    """Encodes float32 to codes of `FORMAT.float8` as int32: nearest, ties to even, saturating."""
    MANTISSA: tl.constexpr = FORMAT.float8.mantissa_bits
    BIAS: tl.constexpr = FORMAT.float8.bias
    LARGEST: tl.constexpr = FORMAT.float8.max
    NAN: tl.constexpr = FORMAT.float8.nan_code
    SHIFT: tl.constexpr = 23 - MANTISSA
    size = tl.abs(y)
    size = tl.where(size > LARGEST, LARGEST, size)
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    # Codes below the smallest normal number count steps of 2^(1 - BIAS - MANTISSA). Adding a float32 whose
    # last place is that step rounds to them.
    GRID: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    steps = (size + GRID).to(tl.int32, bitcast=True) - tl.full((), GRID, tl.float32).to(
        tl.int32, bitcast=True
    )
    SMALL: tl.constexpr = 2.0 ** (1 - BIAS)
    code = tl.where(size < SMALL, steps, normal)
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    if NAN == 0x80:  # negative zero has the code of NaN here
        sign = tl.where(code == 0, 0, sign)
    return tl.where(y != y, NAN, code | sign)
