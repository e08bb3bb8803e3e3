"""Words of codes: loads them from pages, and decodes codes that several formats share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float16_of(bits):
    """Returns the float16 numbers with these bits (the low 16 of any integer type)."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def load_words(pointer, j, there, shifts, MASKED: tl.constexpr, PTX: tl.constexpr):
    """Loads words j [PAD] of rows at pointer [rows, 1]: [rows, PAD].

    there: [rows, PAD], the words to load if MASKED; others are 0. shifts: for `load_24_bit_words`.
    """
    if MASKED:
        return tl.load(pointer + j[None, :], mask=there, other=0)
    else:
        return tl.load(pointer + j[None, :])


@triton.jit
def load_24_bit_words(pointer, j, there, shifts, MASKED: tl.constexpr, PTX: tl.constexpr):
    """Implements `load_words` for words of 24 bits; pointer counts units of 32 bits.

    A word spans one or two units. The result is int32 with undefined upper 8 bits. shifts: int32 [4], the bit
    where words 0 to 3 begin in their unit. They are loaded from memory, because the compiler decodes in a
    product's operand registers only values that come from loads alone.
    """
    # Words come first, rows second, so that neighbouring threads load neighbours in memory. The compiler,
    # which gives a warp the first dimension, cannot see this in these addresses.
    at = tl.trans(pointer) + ((3 * j) >> 2)[:, None]
    crosses = (j & 3) % 3 != 0  # words 1 and 2 of four lie in two units
    inside = tl.trans(there)
    low = tl.load(at, mask=inside, other=0) if MASKED else tl.load(at)
    high = tl.load(at + 1, mask=inside & crosses[:, None], other=0)
    return tl.trans(_funnel(low, high, tl.load(shifts + (j & 3))[:, None], PTX))


@triton.jit
def _funnel(low, high, by, PTX: tl.constexpr):
    """Returns 32 bits from bit `by` of 64-bit numbers in two int32 halves; high is 0 where by is 0."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, by], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = (low.to(tl.uint32, bitcast=True) >> by.to(tl.uint32)).to(tl.int32, bitcast=True)
        return low | (high << ((32 - by) & 31))


@triton.jit
def in_order(parts, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Interleaves E tensors [ROWS, WORDS], elements e of words j, to [ROWS, E * WORDS]: column E * j + e."""
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
def decode_uint4(x, PTX: tl.constexpr):
    """Decodes integers 0..15 to float16 subnormals: n * 2^-20 at odd places of a word, else n * 2^-24.

    A code in place is such a subnormal, and tensor cores multiply subnormals exactly.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; shr.u32 t, $4, 8;
            and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0;
            and.b32 $2, t, 0x000f000f; and.b32 $3, t, 0x00f000f0; }""",
            "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return (
        float16_of(x & 0xF),
        float16_of(x & 0xF0),
        float16_of((x >> 8) & 0xF),
        float16_of((x >> 8) & 0xF0),
    )


@triton.jit
def decode_uint2(x, PTX: tl.constexpr):
    """Decodes integers 0..3 to float16 subnormals: n * 2^-22 at odd places of a word, else n * 2^-24."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, v; shr.u32 t, $8, 4; shr.u32 u, $8, 8; shr.u32 v, $8, 12;
            and.b32 $0, $8, 0x00030003; and.b32 $1, $8, 0x000c000c;
            and.b32 $2, t, 0x00030003; and.b32 $3, t, 0x000c000c;
            and.b32 $4, u, 0x00030003; and.b32 $5, u, 0x000c000c;
            and.b32 $6, v, 0x00030003; and.b32 $7, v, 0x000c000c; }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                   tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    parts = ()
    for i in tl.static_range(4):
        parts = parts + (float16_of((x >> (4 * i)) & 0x3), float16_of((x >> (4 * i)) & 0xC))
    return parts


@triton.jit
def load_halfwords(pointer, there):
    """Loads the 16 bits at pointers [rows] as int32, 0 where not there.

    It loads the 32 bits that contain them, the minimum of the copy pipeline; planes begin and end at
    multiples of 4 bytes.
    """
    address = pointer.to(tl.int64)
    pair = tl.load((address & -4).to(tl.pointer_type(tl.int32)), mask=there, other=0)
    return (pair >> ((address & 2) << 3).to(tl.int32)) & 0xFFFF


@triton.jit
def load_half_scale(pointer, there):
    """Implements `load_row_scale` for float16 scales in the pages."""
    scale = float16_of(load_halfwords(pointer, there)).to(tl.float32)
    return scale, tl.zeros_like(scale)


@triton.jit
def load_row_scale(pointer, there):
    """Loads a float16 or float32 scale per row as float32 [rows]; also returns zeros, as zero points."""
    scale = tl.load(pointer, mask=there, other=0.0).to(tl.float32)
    return scale, tl.zeros_like(scale)
