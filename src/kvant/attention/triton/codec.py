"""How kernels read each format: one table, and the device functions behind it.

Codes are loaded as *words*: 16-bit formats (and float32) one element a word, 8-bit formats two and
4-bit formats four elements in a 16-bit word. Tensor cores take 16-bit operands, and the hardware's
matrix loads (`ldmatrix`, also transposed) move 16-bit units, so a word travels from page to register
without a shuffle; only there is it unpacked, into one float16 tensor for each of its elements.
Element e of word j is number E * j + e of the row. Products over a row are sums of E products, and
the columns of an output are E accumulators.

Unpacking costs one instruction an element or less, because nothing is scaled there:
- e4m3: the hardware's conversion of two codes to two float16 (sm_89 and later), or bits;
- e5m2 is the upper half of a float16;
- int8 and 4-bit integers, biased to be unsigned, are float16 subnormals as they stand: n * 2^-24,
  which tensor cores multiply exactly. The bias, or the zero point, is subtracted from the product:
  q.(n - z) = q.n - z * sum(q), a rank-1 correction;
- e2m1 needs shifts, as its exponent and sign must move; its block scale is multiplied in float16,
  exactly (2 times 4 significant bits).
A scale per row is multiplied with the scores (keys) or the probabilities (values).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl

from kvant.kv.dtype import KVDtype


class Kind(IntEnum):
    """How a word is unpacked."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    E4M3 = 3
    E4M3NUZ = 4
    E5M2 = 5
    INT8 = 6
    UINT4 = 7
    E2M1 = 8


class Scaling(IntEnum):
    """What the scale plane holds."""

    NONE = 0  # no plane; at most one scale for a head
    ROW = 1  # float32, one for a row
    ROW_ZERO = 2  # the same, a zero point in its low 4 bits
    BLOCK = 3  # e4m3, one for 16 elements


@dataclass(frozen=True, slots=True)
class Reading:
    """How kernels read one format.

    elements: numbers in a word. word, scale: torch dtypes to view the planes as. factor: what
    unpacked numbers must be multiplied with (for UINT4, those at odd places; the others 16 times
    that). zero: bias of the codes, the same for all rows.
    """

    kind: Kind
    scaling: Scaling
    elements: int
    word: torch.dtype
    scale: torch.dtype | None
    factor: float
    rotated: bool = False


_16, _32 = torch.int16, torch.float32

READING: dict[KVDtype, Reading] = {
    KVDtype.FLOAT32: Reading(Kind.FLOAT32, Scaling.NONE, 1, torch.float32, None, 1.0),
    KVDtype.FLOAT16: Reading(Kind.FLOAT16, Scaling.NONE, 1, torch.float16, None, 1.0),
    KVDtype.BFLOAT16: Reading(Kind.BFLOAT16, Scaling.NONE, 1, torch.bfloat16, None, 1.0),
    KVDtype.FP8_E4M3: Reading(Kind.E4M3, Scaling.NONE, 2, _16, None, 1.0),
    KVDtype.FP8_E4M3FNUZ: Reading(Kind.E4M3NUZ, Scaling.NONE, 2, _16, None, 1.0),
    KVDtype.FP8_E5M2: Reading(Kind.E5M2, Scaling.NONE, 2, _16, None, 1.0),
    KVDtype.FP8_PER_TOKEN_HEAD: Reading(Kind.E4M3, Scaling.ROW, 2, _16, _32, 1.0),
    KVDtype.INT8_PER_TOKEN_HEAD: Reading(Kind.INT8, Scaling.ROW, 2, _16, _32, 2.0**24),
    KVDtype.INT4_PER_TOKEN_HEAD: Reading(
        Kind.UINT4, Scaling.ROW_ZERO, 4, _16, torch.int32, 2.0**20, rotated=True
    ),
    KVDtype.NVFP4: Reading(Kind.E2M1, Scaling.BLOCK, 4, _16, torch.uint8, 2.0**7),
}

FLOAT32 = tl.constexpr(int(Kind.FLOAT32))
FLOAT16 = tl.constexpr(int(Kind.FLOAT16))
BFLOAT16 = tl.constexpr(int(Kind.BFLOAT16))
E4M3 = tl.constexpr(int(Kind.E4M3))
E4M3NUZ = tl.constexpr(int(Kind.E4M3NUZ))
E5M2 = tl.constexpr(int(Kind.E5M2))
INT8 = tl.constexpr(int(Kind.INT8))
UINT4 = tl.constexpr(int(Kind.UINT4))
E2M1 = tl.constexpr(int(Kind.E2M1))
NO_SCALE = tl.constexpr(int(Scaling.NONE))
ROW = tl.constexpr(int(Scaling.ROW))
ROW_ZERO = tl.constexpr(int(Scaling.ROW_ZERO))
BLOCK = tl.constexpr(int(Scaling.BLOCK))


# Inline PTX below works on two neighbouring words in one register (pack=2).
@triton.jit
def _e4m3_pairs(x):
    return tl.inline_asm_elementwise(
        """{ .reg .b32 lo, hi; .reg .b16 a, b, c, d;
        prmt.b32 lo, $2, 0, 0x4420; prmt.b32 hi, $2, 0, 0x4431;
        mov.b32 {a, b}, lo; mov.b32 {c, d}, hi;
        cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, c; }""",
        "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _e5m2_pairs(x):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00;",
        "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _int8_pairs(x):
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t; lop3.b32 $0, $2, 0x00800080, 0x00ff00ff, 0x28;
        shr.u32 t, $2, 8; lop3.b32 $1, t, 0x00800080, 0x00ff00ff, 0x28; }""",
        "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _uint4_quads(x):
    return tl.inline_asm_elementwise(
        """{ .reg .b32 t; shr.u32 t, $4, 8;
        and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;
        and.b32 $2, t, 0x000f000f; and.b32 $3, t, 0x00f000f0; }""",
        "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _e2m1_quads(x):
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


@triton.jit
def _float16_of(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_value(code, NUZ: tl.constexpr):
    """Codes (any integer type, 0..255) as float16, exactly; NaN codes as NaN."""
    code = code.to(tl.int32)
    if NUZ:
        scale = 128.0
        bad = code == 0x80
    else:
        scale = 256.0
        bad = (code & 0x7F) == 0x7F
    # Sign and exponent lie above the mantissa as in float16, which has one exponent bit more and
    # another bias: a power of two. Subnormal codes are subnormal there too.
    value = _float16_of(((code & 0x80) << 8) | ((code & 0x7F) << 7)) * scale
    return tl.where(bad, float("nan"), value).to(tl.float16)


@triton.jit
def _e2m1_bits(nibble):
    return _float16_of(((nibble & 8) << 12) | ((nibble & 7) << 9))


@triton.jit
def unpack(x, KIND: tl.constexpr, PTX: tl.constexpr):
    """The elements of words x, as a tuple of tensors shaped like x in the operand type."""
    if KIND == FLOAT32 or KIND == FLOAT16 or KIND == BFLOAT16:
        return (x,)
    elif KIND == E4M3:
        if PTX:
            return _e4m3_pairs(x)
        return (e4m3_value(x & 0xFF, False), e4m3_value((x >> 8) & 0xFF, False))
    elif KIND == E4M3NUZ:
        return (e4m3_value(x & 0xFF, True), e4m3_value((x >> 8) & 0xFF, True))
    elif KIND == E5M2:
        if PTX:
            return _e5m2_pairs(x)
        return (_float16_of(x << 8), _float16_of(x & -256))
    elif KIND == INT8:
        if PTX:
            return _int8_pairs(x)
        return (_float16_of((x & 0xFF) ^ 0x80), _float16_of(((x >> 8) & 0xFF) ^ 0x80))
    elif KIND == UINT4:
        if PTX:
            return _uint4_quads(x)
        return (
            _float16_of(x & 0xF),
            _float16_of(x & 0xF0),
            _float16_of((x >> 8) & 0xF),
            _float16_of((x >> 8) & 0xF0),
        )
    else:
        tl.static_assert(KIND == E2M1)
        if PTX:
            return _e2m1_quads(x)
        return (
            _e2m1_bits(x & 0xF),
            _e2m1_bits((x >> 4) & 0xF),
            _e2m1_bits((x >> 8) & 0xF),
            _e2m1_bits((x >> 12) & 0xF),
        )


@triton.jit
def block_factor(code, PTX: tl.constexpr):
    """e4m3 block scales (uint8) as float16, times 2^7: e2m1 bits (2^-14) times that are exact."""
    if PTX:
        # Not marked pure, so that the compiler does not repeat it for every element of the block.
        return tl.inline_asm_elementwise(
            """{ .reg .b16 a, b; .reg .b32 c; mov.b32 {a, b}, $2; mov.b32 c, 0x58005800;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;
            mul.rn.f16x2 $0, $0, c; mul.rn.f16x2 $1, $1, c; }""",
            "=&r,=&r,r", [code], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return e4m3_value(code, False) * 128.0
