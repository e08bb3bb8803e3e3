"""Decodes weights' codes to bfloat16 or float16 in registers. Every conversion is exact; scales come later.

PTX handles four neighbouring elements of a register together (pack=4). Without PTX, for Triton's
interpreter, plain operations give the same numbers as float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3 = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
E2M1 = tl.constexpr(3)


def _both(template: str, **values: tuple[str, str]) -> tuple[tl.constexpr, tl.constexpr]:
    """Returns the assembly for bfloat16 and for float16. values: the text for each placeholder, for both."""
    made = []
    for index, kind in enumerate(("bf16x2", "f16x2")):
        text = template.replace("KIND", kind)
        for name, pair in values.items():
            text = text.replace(name, pair[index])
        made.append(tl.constexpr(text))
    return made[0], made[1]


_E4M3_BF16, _E4M3_FP16 = _both(
    """{ .reg .b32 a, b, s, t, m, z;
            mov.b32 m, FACTOR; mov.b32 z, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x7f007f00; and.b32 t, b, 0x7f007f00;
            shr.u32 s, s, PLACES; shr.u32 t, t, PLACES;
            lop3.b32 a, a, 0x80008000, s, 0xea; lop3.b32 b, b, 0x80008000, t, 0xea;
            fma.rn.KIND $0, a, m, z; fma.rn.KIND $1, b, m, z; }""",
    FACTOR=("0x7b807b80", "0x5c005c00"),
    PLACES=("4", "1"),
)
_INT8_BF16, _INT8_FP16 = _both(
    """{ .reg .b32 a, b, s, t, m;
            mov.b32 m, MINUS;
            prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
            and.b32 s, a, 0x00800080; and.b32 t, b, 0x00800080;
            or.b32 s, s, BASE; or.b32 t, t, BASE;
            and.b32 a, a, 0x007f007f; and.b32 b, b, 0x007f007f;
            or.b32 a, a, BASE; or.b32 b, b, BASE;
            fma.rn.KIND $0, s, m, a; fma.rn.KIND $1, t, m, b; }""",
    MINUS=("0xbf80bf80", "0xbc00bc00"),
    BASE=("0x43004300", "0x64006400"),
)
_INT4_BF16, _INT4_FP16 = _both(
    """{ .reg .b32 a, b, c, d, o, m;
            mov.b32 o, ONE; mov.b32 m, LESS;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4; shr.u32 d, b, 4;
            and.b32 a, a, 0x000f000f; and.b32 b, b, 0x000f000f;
            and.b32 c, c, 0x000f000f; and.b32 d, d, 0x000f000f;
            or.b32 a, a, BASE; or.b32 b, b, BASE;
            or.b32 c, c, BASE; or.b32 d, d, BASE;
            fma.rn.KIND $0, a, o, m; fma.rn.KIND $1, b, o, m;
            fma.rn.KIND $2, c, o, m; fma.rn.KIND $3, d, o, m; }""",
    ONE=("0x3f803f80", "0x3c003c00"),
    LESS=("0xc308c308", "0xe408e408"),
    BASE=("0x43004300", "0x64006400"),
)
_LESS_BF16, _LESS_FP16 = _both(
    """{ .reg .b32 a, b, c, d, y, z, m;
            mov.b32 m, MINUS;
            prmt.b32 y, $5, 0, 0x4140; prmt.b32 z, $5, 0, 0x4342;
            or.b32 y, y, BASE; or.b32 z, z, BASE;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4; shr.u32 d, b, 4;
            and.b32 a, a, 0x000f000f; and.b32 b, b, 0x000f000f;
            and.b32 c, c, 0x000f000f; and.b32 d, d, 0x000f000f;
            or.b32 a, a, BASE; or.b32 b, b, BASE;
            or.b32 c, c, BASE; or.b32 d, d, BASE;
            fma.rn.KIND $0, y, m, a; fma.rn.KIND $1, z, m, b;
            fma.rn.KIND $2, y, m, c; fma.rn.KIND $3, z, m, d; }""",
    MINUS=("0xbf80bf80", "0xbc00bc00"),
    BASE=("0x43004300", "0x64006400"),
)
_E2M1_BF16, _E2M1_FP16 = _both(
    """{ .reg .b32 a, b, s, t, m, z;
            mov.b32 m, FACTOR; mov.b32 z, 0x80008000;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            and.b32 s, a, 0x00070007; shl.b32 s, s, LOW; and.b32 t, a, 0x00080008; shl.b32 t, t, 12;
            or.b32 s, s, t; fma.rn.KIND $0, s, m, z;
            and.b32 s, b, 0x00070007; shl.b32 s, s, LOW; and.b32 t, b, 0x00080008; shl.b32 t, t, 12;
            or.b32 s, s, t; fma.rn.KIND $1, s, m, z;
            and.b32 s, a, 0x00700070; shl.b32 s, s, HIGH; and.b32 t, a, 0x00800080; shl.b32 t, t, 8;
            or.b32 s, s, t; fma.rn.KIND $2, s, m, z;
            and.b32 s, b, 0x00700070; shl.b32 s, s, HIGH; and.b32 t, b, 0x00800080; shl.b32 t, t, 8;
            or.b32 s, s, t; fma.rn.KIND $3, s, m, z; }""",
    FACTOR=("0x7e807e80", "0x74007400"),
    LOW=("6", "9"),
    HIGH=("2", "5"),
)


@triton.jit
def decode_e4m3(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Decodes uint8 codes: moves the code's bits into place, times a power of two for the exponent's bias.

    Subnormal codes become subnormal numbers before the multiplication.
    """
    if PTX:
        if dtype == tl.float16:
            return tl.inline_asm_elementwise(
                _E4M3_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _E4M3_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
            )  # fmt: skip
    else:
        c = codes.to(tl.int32)
        bits = ((c & 0x80) << 24) | ((c & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def decode_int8(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Decodes uint8 bits of int8 codes: (base + low seven bits) - (base, or base + 128 if negative)."""
    if PTX:
        if dtype == tl.float16:
            return tl.inline_asm_elementwise(
                _INT8_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _INT8_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
            )  # fmt: skip
    else:
        c = codes.to(tl.int32)
        return ((c & 0x7F) - (c & 0x80)).to(tl.float32)


@triton.jit
def decode_int4(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Decodes bytes of two codes to (low - 8, high - 8): a base with n in its low bits is base + n."""
    if PTX:
        if dtype == tl.float16:
            return tl.inline_asm_elementwise(
                _INT4_FP16, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _INT4_BF16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        c = codes.to(tl.int32)
        low = ((c & 15) - 8).to(tl.float32)
        return low, (((c >> 4) & 15) - 8).to(tl.float32)


@triton.jit
def decode_int4_less(codes, zeros, dtype: tl.constexpr, PTX: tl.constexpr):
    """Decodes bytes of two codes to (low, high) minus their zero point, uint8 of the same shape."""
    if PTX:
        if dtype == tl.float16:
            return tl.inline_asm_elementwise(
                _LESS_FP16, "=r,=r,=r,=r,r,r", [codes, zeros], dtype=(tl.float16, tl.float16),
                is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _LESS_BF16, "=r,=r,=r,=r,r,r", [codes, zeros], dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=4,
            )  # fmt: skip
    else:
        c, z = codes.to(tl.int32), zeros.to(tl.int32)
        low = ((c & 15) - z).to(tl.float32)
        return low, (((c >> 4) & 15) - z).to(tl.float32)


@triton.jit
def decode_e2m1(codes, dtype: tl.constexpr, PTX: tl.constexpr):
    """Decodes bytes of two codes to (low, high): moves bits into place, times a power of two for the bias."""
    if PTX:
        if dtype == tl.float16:
            return tl.inline_asm_elementwise(
                _E2M1_FP16, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _E2M1_BF16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
            )  # fmt: skip
    else:
        c = codes.to(tl.int32)
        return _e2m1_value(c & 15), _e2m1_value((c >> 4) & 15)


@triton.jit
def _e2m1_value(n):
    bits = ((n & 8) << 28) | ((n & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
