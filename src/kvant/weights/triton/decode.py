"""Codes of weights to bfloat16 in registers. Every conversion is exact; scales come later.

PTX handles four neighbouring elements in a register (pack=4), each by itself. Without PTX the same
numbers come from plain operations as float32, for Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3 = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
E2M1 = tl.constexpr(3)


@triton.jit
def decode_e4m3(codes, PTX: tl.constexpr):
    """uint8 codes to bfloat16: the code's bits in bfloat16's places, times 2^120 for the bias.

    bfloat16 has the exponents of both, so subnormal codes are subnormal there too.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, s, t, m, z;
            mov.b32 m, 0x7b807b80; mov.b32 z, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
            and.b32 s, a, 0x7f007f00; and.b32 t, b, 0x7f007f00;
            shr.u32 s, s, 4; shr.u32 t, t, 4;
            lop3.b32 a, a, 0x80008000, s, 0xea; lop3.b32 b, b, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $0, a, m, z; fma.rn.bf16x2 $1, b, m, z; }""",
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        c = codes.to(tl.int32)
        bits = ((c & 0x80) << 24) | ((c & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def decode_int8(codes, PTX: tl.constexpr):
    """uint8 bits of int8 codes to bfloat16: (128 + low seven bits) - (128, or 256 if negative)."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, s, t, m;
            mov.b32 m, 0xbf80bf80;
            prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
            and.b32 s, a, 0x00800080; and.b32 t, b, 0x00800080;
            or.b32 s, s, 0x43004300; or.b32 t, t, 0x43004300;
            and.b32 a, a, 0x007f007f; and.b32 b, b, 0x007f007f;
            or.b32 a, a, 0x43004300; or.b32 b, b, 0x43004300;
            fma.rn.bf16x2 $0, s, m, a; fma.rn.bf16x2 $1, t, m, b; }""",
            "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        c = codes.to(tl.int32)
        return ((c & 0x7F) - (c & 0x80)).to(tl.float32)


@triton.jit
def decode_int4(codes, PTX: tl.constexpr):
    """uint8 bytes of two codes to (low, high) less 8, bfloat16: 128 + n is 0x4300 | n."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, o, m;
            mov.b32 o, 0x3f803f80; mov.b32 m, 0xc308c308;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4; shr.u32 d, b, 4;
            and.b32 a, a, 0x000f000f; and.b32 b, b, 0x000f000f;
            and.b32 c, c, 0x000f000f; and.b32 d, d, 0x000f000f;
            or.b32 a, a, 0x43004300; or.b32 b, b, 0x43004300;
            or.b32 c, c, 0x43004300; or.b32 d, d, 0x43004300;
            fma.rn.bf16x2 $0, a, o, m; fma.rn.bf16x2 $1, b, o, m;
            fma.rn.bf16x2 $2, c, o, m; fma.rn.bf16x2 $3, d, o, m; }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        c = codes.to(tl.int32)
        low = ((c & 15) - 8).to(tl.float32)
        return low, (((c >> 4) & 15) - 8).to(tl.float32)


@triton.jit
def decode_int4_less(codes, zeros, PTX: tl.constexpr):
    """uint8 bytes of two codes to (low, high) less their zero point (uint8 of the same shape)."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, y, z, m;
            mov.b32 m, 0xbf80bf80;
            prmt.b32 y, $5, 0, 0x4140; prmt.b32 z, $5, 0, 0x4342;
            or.b32 y, y, 0x43004300; or.b32 z, z, 0x43004300;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4; shr.u32 d, b, 4;
            and.b32 a, a, 0x000f000f; and.b32 b, b, 0x000f000f;
            and.b32 c, c, 0x000f000f; and.b32 d, d, 0x000f000f;
            or.b32 a, a, 0x43004300; or.b32 b, b, 0x43004300;
            or.b32 c, c, 0x43004300; or.b32 d, d, 0x43004300;
            fma.rn.bf16x2 $0, y, m, a; fma.rn.bf16x2 $1, z, m, b;
            fma.rn.bf16x2 $2, y, m, c; fma.rn.bf16x2 $3, z, m, d; }""",
            "=r,=r,=r,=r,r,r", [codes, zeros], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        c, z = codes.to(tl.int32), zeros.to(tl.int32)
        low = ((c & 15) - z).to(tl.float32)
        return low, (((c >> 4) & 15) - z).to(tl.float32)


@triton.jit
def decode_e2m1(codes, PTX: tl.constexpr):
    """uint8 bytes of two codes to (low, high), bfloat16: bits in place, times 2^126 for the bias."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, s, t, m, z;
            mov.b32 m, 0x7e807e80; mov.b32 z, 0x80008000;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            and.b32 s, a, 0x00070007; shl.b32 s, s, 6; and.b32 t, a, 0x00080008; shl.b32 t, t, 12;
            or.b32 s, s, t; fma.rn.bf16x2 $0, s, m, z;
            and.b32 s, b, 0x00070007; shl.b32 s, s, 6; and.b32 t, b, 0x00080008; shl.b32 t, t, 12;
            or.b32 s, s, t; fma.rn.bf16x2 $1, s, m, z;
            and.b32 s, a, 0x00700070; shl.b32 s, s, 2; and.b32 t, a, 0x00800080; shl.b32 t, t, 8;
            or.b32 s, s, t; fma.rn.bf16x2 $2, s, m, z;
            and.b32 s, b, 0x00700070; shl.b32 s, s, 2; and.b32 t, b, 0x00800080; shl.b32 t, t, 8;
            or.b32 s, s, t; fma.rn.bf16x2 $3, s, m, z; }""",
            "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        c = codes.to(tl.int32)
        return _e2m1_value(c & 15), _e2m1_value((c >> 4) & 15)


@triton.jit
def _e2m1_value(n):
    bits = ((n & 8) << 28) | ((n & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
