"""How kernels read each format: one table, and the device functions behind it.

Codes are loaded as *words*: 16-bit formats (and float32) one element a word, 8-bit formats two and
4-bit formats four elements in a 16-bit word, 3-bit formats eight in 24 bits of 32-bit units. Tensor cores
take 16-bit operands, and the hardware's matrix loads (`ldmatrix`, also transposed) move 16-bit units, so a
word travels from page to register without a shuffle; only there is it unpacked, into one float16
tensor for each of its elements.
Element e of word j is number E * j + e of the row. Products over a row are sums of E products, and
the columns of an output are E accumulators.

Unpacking costs one instruction an element or less, because nothing is scaled there:
- e4m3: the hardware's conversion of two codes to two float16 (sm_89 and later), or bits;
- e5m2 is the upper half of a float16;
- int8 and 4-bit integers, biased to be unsigned, are float16 subnormals as they stand: n * 2^-24,
  which tensor cores multiply exactly. The bias, or the zero point, is subtracted from the product:
  q.(n - z) = q.n - z * sum(q), a rank-1 correction;
- e2m1 needs shifts, as its exponent and sign must move; its block scale is multiplied in float16,
  exactly (2 times 4 significant bits);
- centroids are whole numbers of 1/256 below 1024, so float16 subnormals with a sign. The upper byte of
  such a number takes few values and is looked up by the code's upper three bits, the lower byte by
  its lower three: each look-up is a byte permutation of a table of eight, four codes at a time.
A scale per row is multiplied with the scores (keys) or the probabilities (values). A minimum per row
adds its product with the sum of the query, or of the probabilities: a rank-1 term again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl

from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT
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
    CODEBOOK4 = 9
    CODEBOOK3 = 10
    UINT3 = 11


class Scaling(IntEnum):
    """What the scale plane holds."""

    NONE = 0  # no plane; at most one scale for a head
    ROW = 1  # float32, one for a row
    ROW_ZERO = 2  # the same, a zero point in its low 4 bits
    BLOCK = 3  # e4m3, one for 16 elements
    ROW_HALF = 4  # float16, one for a row
    ROW_MINIMUM = 5  # float16, scale and minimum of a row


@dataclass(frozen=True, slots=True)
class Reading:
    """How kernels read one format.

    elements: numbers in a word. word, scale: torch dtypes to view the planes as. factor: what
    unpacked numbers must be multiplied with (for UINT4 and UINT3, those at odd places; the others 16
    and 8 times that).
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
    KVDtype.TURBOQUANT_K8: Reading(Kind.E4M3, Scaling.NONE, 2, _16, None, 1.0),
    KVDtype.TURBOQUANT_K4: Reading(
        Kind.CODEBOOK4, Scaling.ROW_HALF, 4, _16, torch.float16, 2.0**16, rotated=True
    ),
    KVDtype.TURBOQUANT_K3: Reading(
        Kind.CODEBOOK3, Scaling.ROW_HALF, 8, torch.int32, torch.float16, 2.0**16, rotated=True
    ),
    KVDtype.TURBOQUANT_V4: Reading(Kind.UINT4, Scaling.ROW_MINIMUM, 4, _16, torch.int32, 2.0**20),
    KVDtype.TURBOQUANT_V3: Reading(
        Kind.UINT3, Scaling.ROW_MINIMUM, 8, torch.int32, torch.int32, 2.0**21
    ),
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
CODEBOOK4 = tl.constexpr(int(Kind.CODEBOOK4))
CODEBOOK3 = tl.constexpr(int(Kind.CODEBOOK3))
UINT3 = tl.constexpr(int(Kind.UINT3))
NO_SCALE = tl.constexpr(int(Scaling.NONE))
ROW = tl.constexpr(int(Scaling.ROW))
ROW_ZERO = tl.constexpr(int(Scaling.ROW_ZERO))
BLOCK = tl.constexpr(int(Scaling.BLOCK))
ROW_HALF = tl.constexpr(int(Scaling.ROW_HALF))
ROW_MINIMUM = tl.constexpr(int(Scaling.ROW_MINIMUM))


def _float16_bits(centroids: tuple[float, ...]) -> tuple[int, ...]:
    """By code: the float16 subnormal of 2^-16 times the centroid."""
    found = tuple(int(abs(c) * 256) | (0x8000 if c < 0 else 0) for c in centroids)
    assert all(bits & 0x7FFF < 1024 for bits in found)
    return found


_BITS4, _BITS3 = _float16_bits(CENTROIDS_4BIT), _float16_bits(CENTROIDS_3BIT)


def _table(eight: tuple[int, ...]) -> int:
    """Eight bytes as an int64."""
    return int.from_bytes(bytes(eight), "little", signed=True)


# By three of a code's four bits: its upper byte does not depend on the lowest, its lower byte not on
# the sign.
assert all(_BITS4[2 * i] >> 8 == _BITS4[2 * i + 1] >> 8 for i in range(8))
_LOW4 = _table(tuple(bits & 0xFF for bits in _BITS4[:8]))
_HIGH4 = _table(tuple(bits >> 8 for bits in _BITS4[::2]))
_LOW3 = _table(tuple(bits & 0xFF for bits in _BITS3))
_HIGH3 = _table(tuple(bits >> 8 for bits in _BITS3))
LOW4, HIGH4 = tl.constexpr(_LOW4), tl.constexpr(_HIGH4)
LOW3, HIGH3 = tl.constexpr(_LOW3), tl.constexpr(_HIGH3)


def _registers(table: int) -> str:
    """The two that `prmt` looks a table's bytes up in."""
    return f"{table & 0xFFFFFFFF:#010x}, {table >> 32 & 0xFFFFFFFF:#010x}"


def _look_up(low: int, high: int, lower: str, upper: str, first: int) -> str:
    """Four codes, by the selectors in the low halves of two registers, into outputs first, first + 1.

    The codes are elements first and first + 1 of one word, then of the other.
    """
    return (
        f"prmt.b32 l, {_registers(low)}, {lower}; prmt.b32 h, {_registers(high)}, {upper};"
        f"prmt.b32 ${first}, l, h, 0x6240; prmt.b32 ${first + 1}, l, h, 0x7351;"
    )


_CODEBOOK4_PTX = tl.constexpr(
    "{ .reg .b32 s, u, l, h; prmt.b32 s, $4, 0, 0x3120;"
    "shr.u32 u, s, 1; and.b32 u, u, 0x77777777; and.b32 s, s, 0x77777777;"
    + _look_up(_LOW4, _HIGH4, "s", "u", 0)
    + "shr.u32 s, s, 16; shr.u32 u, u, 16;"
    + _look_up(_LOW4, _HIGH4, "s", "u", 2)
    + "}"
)


def _spread(x: str, to: str) -> str:
    """Eight codes of 3 bits to nibbles: halves, bytes, nibbles apart."""
    steps = ((4, 0x0000FFFF, x), (2, 0x00FF00FF, to), (1, 0x0F0F0F0F, to))
    apart = "".join(
        f"shl.b32 t, {source}, {by}; lop3.b32 {to}, {source}, t, {mask:#010x}, 0xe4;"
        for by, mask, source in steps
    )
    return apart + f"and.b32 {to}, {to}, 0x77777777;"


_CODEBOOK3_PTX = tl.constexpr(
    "{ .reg .b32 a, b, s, u, t, l, h;"
    + _spread("$8", "a")
    + _spread("$9", "b")
    + "prmt.b32 s, a, b, 0x5140; prmt.b32 u, a, b, 0x7362;"
    + _look_up(_LOW3, _HIGH3, "s", "s", 0)
    + "shr.u32 s, s, 16;"
    + _look_up(_LOW3, _HIGH3, "s", "s", 2)
    + _look_up(_LOW3, _HIGH3, "u", "u", 4)
    + "shr.u32 u, u, 16;"
    + _look_up(_LOW3, _HIGH3, "u", "u", 6)
    + "}"
)


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
def _codebook4_quads(x):
    return tl.inline_asm_elementwise(
        _CODEBOOK4_PTX, "=&r,=&r,=&r,=&r,r", [x],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _codebook3_octets(x):
    return tl.inline_asm_elementwise(
        _CODEBOOK3_PTX, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [x],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
               tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _uint3_octets(x):
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
def _byte(table, place):
    return (tl.full((), table, tl.int64) >> (8 * place.to(tl.int64))) & 0xFF


@triton.jit
def _centroid(lower, upper, LOW: tl.constexpr, HIGH: tl.constexpr):
    """2^-16 times the centroids of codes, as float16, by the bits that choose either byte."""
    return _float16_of(_byte(LOW, lower) | (_byte(HIGH, upper) << 8))


@triton.jit
def _funnel(low, high, by, PTX: tl.constexpr):
    """Bits from bit `by` on of 64-bit numbers in two int32 halves; high is 0 where by is 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, by], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = (low.to(tl.uint32, bitcast=True) >> by.to(tl.uint32)).to(tl.int32, bitcast=True)
        return low | (high << ((32 - by) & 31))


@triton.jit
def load_words(
    pointer, j, there, shifts, MASKED: tl.constexpr, ELEMENTS: tl.constexpr, PTX: tl.constexpr
):
    """Words j [PAD] of rows at pointer [rows, 1].

    there: [rows, PAD] of words to load where MASKED; others are 0. Words of 24 bits lie in one 32-bit
    unit or two, pointer counts those, and the result is int32 with noise in the upper 8 bits. shifts
    is for them alone: where words 0 to 3 begin in their unit. These numbers lie in memory because the
    compiler unpacks in the registers of a product only what comes from loads alone.
    """
    if ELEMENTS == 8:
        # Words first, rows second: neighbours in memory are loaded by neighbouring threads then, which
        # the compiler cannot see in these numbers. It gives a warp the first dimension.
        at = tl.trans(pointer) + ((3 * j) >> 2)[:, None]
        crosses = (j & 3) % 3 != 0  # words 1 and 2 of four
        inside = tl.trans(there)
        low = tl.load(at, mask=inside, other=0) if MASKED else tl.load(at)
        high = tl.load(at + 1, mask=inside & crosses[:, None], other=0)
        return tl.trans(_funnel(low, high, tl.load(shifts + (j & 3))[:, None], PTX))
    elif MASKED:
        return tl.load(pointer + j[None, :], mask=there, other=0)
    else:
        return tl.load(pointer + j[None, :])


@triton.jit
def row_scales(pointer, row, there, SCALING: tl.constexpr):
    """(scale, zero point or minimum) of rows, float32; only for scalings with one for a row."""
    if SCALING == ROW or SCALING == ROW_HALF:
        scale = tl.load(pointer + row, mask=there, other=0.0).to(tl.float32)
        return scale, tl.zeros_like(scale)
    else:
        bits = tl.load(pointer + row, mask=there, other=0)
        if SCALING == ROW_ZERO:
            return (bits & -16).to(tl.float32, bitcast=True), (bits & 15).to(tl.float32)
        else:
            tl.static_assert(SCALING == ROW_MINIMUM)
            return _float16_of(bits & 0xFFFF).to(tl.float32), _float16_of(bits >> 16).to(tl.float32)


@triton.jit
def times(KIND: tl.constexpr, e: tl.constexpr):
    """How much smaller than at odd places this kind's numbers are unpacked at place e of a word."""
    return 16.0 if KIND == UINT4 and e % 2 == 0 else 8.0 if KIND == UINT3 and e % 2 == 0 else 1.0


@triton.jit
def in_order(parts, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Elements e of words j, E tensors [ROWS, WORDS], as [ROWS, E * WORDS]: column E * j + e."""
    if len(parts) == 1:
        y = parts[0]
    elif len(parts) == 2:
        y = tl.join(parts[0], parts[1])
    elif len(parts) == 4:
        y = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    else:
        y = tl.join(
            tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6])),
            tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7])),
        )
    return tl.reshape(y, (ROWS, len(parts) * WORDS))


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
    elif KIND == UINT3:
        if PTX:
            return _uint3_octets(x)
        parts = ()
        for i in tl.static_range(4):
            parts = parts + (_float16_of((x >> (6 * i)) & 0x7), _float16_of((x >> (6 * i)) & 0x38))
        return parts
    elif KIND == CODEBOOK3:
        if PTX:
            return _codebook3_octets(x)
        parts = ()
        for i in tl.static_range(8):
            code = (x >> (3 * i)) & 7
            parts = parts + (_centroid(code, code, LOW3, HIGH3),)
        return parts
    elif KIND == CODEBOOK4:
        if PTX:
            return _codebook4_quads(x)
        parts = ()
        for i in tl.static_range(4):
            code = (x >> (4 * i)) & 15
            parts = parts + (_centroid(code & 7, code >> 1, LOW4, HIGH4),)
        return parts
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
