"""How kernels encode: every format's definition (`kvant.kv.codecs`), with the same bytes.

Everything is float32 and integer arithmetic on bits; no hardware conversion to 8 bits is used, so the
same code runs on every device and in Triton's interpreter. Division is IEEE division: Triton's own
may flush subnormals, so on NVIDIA it is one PTX instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.codec import E4M3, E4M3NUZ, E5M2, e4m3_value
from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT, middles

CLAMP = tl.constexpr(2.0**100)
LEAST = tl.constexpr(2.0**-126)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to integers
NAN_BITS = tl.constexpr(0x7FC00000)
NAN_HALF = tl.constexpr(0x7E00)
LARGEST_HALF = tl.constexpr(65504.0)
_SIZES4 = tl.constexpr(CENTROIDS_4BIT[:8])
_SIZES3 = tl.constexpr(CENTROIDS_3BIT[:4])
_MIDDLES4 = tl.constexpr(middles(CENTROIDS_4BIT))
_MIDDLES3 = tl.constexpr(middles(CENTROIDS_3BIT))


@triton.jit
def divide(a, b, PTX: tl.constexpr):
    if PTX:
        a, b = tl.broadcast(a, b)
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(a, b)


@triton.jit
def square(x, PTX: tl.constexpr):
    """x * x, rounded separately, so that a following addition is not fused."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * x


@triton.jit
def nearest(x):
    """Nearest integer, ties to even, for magnitudes below 2^22."""
    return (x + ROUND) - ROUND


@triton.jit
def bound(x, low, high):
    """x within [low, high]; NaN stays."""
    x = tl.where(x < low, low, x)
    return tl.where(x > high, high, x)


@triton.jit
def widen(x):
    return bound(x.to(tl.float32), -CLAMP, CLAMP)


@triton.jit
def bfloat16(x):
    """float32 to bfloat16: nearest, ties to even, saturating; NaN becomes 0x7fc0."""
    LARGEST: tl.constexpr = 3.3895313892515355e38
    bits = bound(x, -LARGEST, LARGEST).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    bits = tl.where(x != x, 0x7FC0, bits)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def has_nan(x):
    """True where a row [rows, columns] holds NaN."""
    return tl.max((x != x).to(tl.int32), 1) > 0


@triton.jit
def row_scale(span, steps, PTX: tl.constexpr):
    """span / steps, at least LEAST; for rows without NaN."""
    scale = divide(span, steps + 0.0 * span, PTX)
    return tl.where(scale < LEAST, LEAST, scale)


@triton.jit
def float8_code(y, KIND: tl.constexpr):
    """float32 to 8-bit float codes as int32: nearest, ties to even, saturating."""
    if KIND == E5M2:
        MANTISSA: tl.constexpr = 2
        BIAS: tl.constexpr = 15
        LARGEST: tl.constexpr = 57344.0
        NAN: tl.constexpr = 0x7F
    elif KIND == E4M3NUZ:
        MANTISSA: tl.constexpr = 3
        BIAS: tl.constexpr = 8
        LARGEST: tl.constexpr = 240.0
        NAN: tl.constexpr = 0x80
    else:
        MANTISSA: tl.constexpr = 3
        BIAS: tl.constexpr = 7
        LARGEST: tl.constexpr = 448.0
        NAN: tl.constexpr = 0x7F
    SHIFT: tl.constexpr = 23 - MANTISSA
    size = tl.abs(y)
    size = tl.where(size > LARGEST, LARGEST, size)
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << MANTISSA
    # Below the smallest normal number codes count steps of 2^(1 - BIAS - MANTISSA); a float32 whose
    # last place is that step rounds to them.
    GRID: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    steps = (size + GRID).to(tl.int32, bitcast=True) - tl.full((), GRID, tl.float32).to(
        tl.int32, bitcast=True
    )
    SMALL: tl.constexpr = 2.0 ** (1 - BIAS)
    code = tl.where(size < SMALL, steps, normal)
    sign = (y.to(tl.int32, bitcast=True) >> 24) & 0x80
    if KIND == E4M3NUZ:
        sign = tl.where(code == 0, 0, sign)
    return tl.where(y != y, NAN, code | sign)


@triton.jit
def e2m1_code(x):
    """float32 to e2m1 codes 0..15 as int32; no NaN."""
    size = tl.abs(x)
    halves = nearest(tl.minimum(size * 2.0, 4.0))
    ones = nearest(bound(size - 2.0, 0.0, 2.0))
    twos = nearest(bound((size - 4.0) * 0.5, 0.0, 1.0))
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return (halves + ones + twos).to(tl.int32) | sign


@triton.jit
def pack_nibbles(code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
    return low | (high << 4)


@triton.jit
def pack_threes(code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes of 3 bits as one number of 24 for every eight of them: [ROWS, COLUMNS / 8]."""
    eights = tl.reshape(code, (ROWS, COLUMNS // 8, 8))
    return tl.sum(eights << (3 * tl.arange(0, 8))[None, None, :], 2)


@triton.jit
def half(x):
    """float32 without NaN to float16: nearest, saturating; never -0."""
    x = bound(x, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    return tl.where(x == 0.0, 0.0, x).to(tl.float16)


@triton.jit
def _length(y, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr):
    """The root of the sum of squares of rows, neighbours first; zeros beside a row change nothing."""
    sums = square(y, PTX)
    STAGES: tl.constexpr = COLUMNS.bit_length() - 1
    for stage in tl.static_range(STAGES):
        # Two at a time: their order does not matter. (`tl.split` makes every thread add everything.)
        sums = tl.sum(tl.reshape(sums, (ROWS, COLUMNS >> (stage + 1), 2)), 2)
    return tl.sqrt_rn(tl.reshape(sums, (ROWS,)))


@triton.jit
def codebook_codes(
    y, unit, HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """(codes [ROWS, COLUMNS] int32, scales [ROWS] float16) of rotated rows in units of `unit` [ROWS].

    Columns from HEAD on are zeros.
    """
    root = _length(y, ROWS, COLUMNS, PTX)
    wide = tl.sqrt_rn(tl.full((), HEAD, tl.float32))
    empty = root == 0
    root_or_one = tl.where(empty, 1.0, root)
    z = divide(y * wide, root_or_one[:, None] + 0.0 * tl.zeros_like(y), PTX)
    size = tl.abs(z)
    sizes: tl.constexpr = _SIZES4 if BITS == 4 else _SIZES3
    between: tl.constexpr = _MIDDLES4 if BITS == 4 else _MIDDLES3
    code = tl.where(z < 0, 1 << (BITS - 1), 0)
    found = tl.zeros_like(y) + sizes[0]
    for i in tl.static_range((1 << (BITS - 1)) - 1):
        further = size > between[i]
        code += further.to(tl.int32)
        found = tl.where(further, sizes[i + 1], found)
    found = tl.where((tl.arange(0, COLUMNS) < HEAD)[None, :], found, 0.0)
    scale = divide(root, _length(found, ROWS, COLUMNS, PTX), PTX) * unit
    return code, half(scale)


@triton.jit
def smallest_first_codes(
    x, inside, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr
):
    """(codes [ROWS, COLUMNS] int32, scale, minimum [ROWS] float16) of widened x without NaN.

    inside: [1, COLUMNS], which columns there are.
    """
    STEPS: tl.constexpr = (1 << BITS) - 1
    low = half(tl.min(tl.where(inside, x, float("inf")), 1))
    start = low.to(tl.float32)
    span = tl.max(tl.where(inside, x, float("-inf")), 1) - start
    span = tl.where(span > 0, span, 0.0)
    scale = half(divide(span, tl.full((ROWS,), STEPS, tl.float32), PTX))
    step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
    code = divide(x - start[:, None], step[:, None] + 0.0 * tl.zeros_like(x), PTX)
    code = nearest(bound(code, 0.0, STEPS * 1.0)).to(tl.int32)
    return tl.where((scale == 0.0)[:, None], 0, code), scale, low


@triton.jit
def nvfp4_codes(x, outer, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr):
    """(codes [ROWS, COLUMNS], block scale codes [ROWS, COLUMNS / 16]) of widened x, int32.

    outer: [ROWS * COLUMNS / 16], the scale above each block's.
    """
    blocks = tl.reshape(x, (ROWS * (COLUMNS // 16), 16))
    amax = tl.max(tl.abs(blocks), 1)
    broken = has_nan(blocks)
    amax = tl.where(broken, 0.0, amax)
    code = float8_code(divide(divide(amax, 6.0 + 0.0 * amax, PTX), outer + 0.0 * amax, PTX), E4M3)
    code = tl.where((code == 0) & (amax > 0), 1, code)
    step = e4m3_value(code, False).to(tl.float32) * outer
    empty = broken | (step == 0)
    steps = divide(blocks, tl.where(empty, 1.0, step)[:, None] + 0.0 * tl.abs(blocks), PTX)
    codes = e2m1_code(tl.where(empty[:, None], 0.0, steps))
    code = tl.where(broken, 0x7F, code)
    return tl.reshape(codes, (ROWS, COLUMNS)), tl.reshape(code, (ROWS, COLUMNS // 16))
