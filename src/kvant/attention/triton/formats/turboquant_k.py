"""turboquant_k4 and turboquant_k3: rotated rows in a codebook, a float16 scale per row.

Centroids are multiples of 1/256 below 1024/256, so they are float16 subnormals with a sign. The upper byte of
such a number takes few values and is looked up by the code's upper three bits, the lower byte by its lower
three. Each look-up is a byte permutation of a table of eight bytes, four codes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvant.attention.triton.arithmetic import (
    LEAST,
    NAN_HALF,
    divide,
    half,
    has_nan,
    store_packed,
    widen,
)
from kvant.attention.triton.format import Kernels
from kvant.attention.triton.rotation import hadamard
from kvant.attention.triton.words import float16_of, load_half_scale
from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT, middles
from kvant.kv.format import KVFormat


def _float16_bits(centroids: tuple[float, ...]) -> tuple[int, ...]:
    """Returns, for each code, the bits of the float16 subnormal of 2^-16 times the centroid."""
    found = tuple(int(abs(c) * 256) | (0x8000 if c < 0 else 0) for c in centroids)
    assert all(bits & 0x7FFF < 1024 for bits in found)
    return found


def _table(eight: tuple[int, ...]) -> int:
    """Packs eight bytes into an int64."""
    return int.from_bytes(bytes(eight), "little", signed=True)


_BITS4, _BITS3 = _float16_bits(CENTROIDS_4BIT), _float16_bits(CENTROIDS_3BIT)
# Tables are indexed by three of a code's four bits: the upper byte does not depend on the lowest bit, the
# lower byte not on the sign.
assert all(_BITS4[2 * i] >> 8 == _BITS4[2 * i + 1] >> 8 for i in range(8))
_LOW4 = _table(tuple(bits & 0xFF for bits in _BITS4[:8]))
_HIGH4 = _table(tuple(bits >> 8 for bits in _BITS4[::2]))
_LOW3 = _table(tuple(bits & 0xFF for bits in _BITS3))
_HIGH3 = _table(tuple(bits >> 8 for bits in _BITS3))


def _registers(table: int) -> str:
    """Returns the two registers in which `prmt` looks up a table's bytes."""
    return f"{table & 0xFFFFFFFF:#010x}, {table >> 32 & 0xFFFFFFFF:#010x}"


def _look_up(low: int, high: int, lower: str, upper: str, first: int) -> str:
    """Emits the look-up of four codes, by the selectors in the low halves of two registers.

    The results go to outputs first and first + 1: elements of one word, then of the other.
    """
    return (
        f"prmt.b32 l, {_registers(low)}, {lower}; prmt.b32 h, {_registers(high)}, {upper};"
        f"prmt.b32 ${first}, l, h, 0x6240; prmt.b32 ${first + 1}, l, h, 0x7351;"
    )


def _spread(x: str, to: str) -> str:
    """Spreads eight 3-bit codes to nibbles, in steps of halves, bytes, nibbles."""
    steps = ((4, 0x0000FFFF, x), (2, 0x00FF00FF, to), (1, 0x0F0F0F0F, to))
    apart = "".join(
        f"shl.b32 t, {source}, {by}; lop3.b32 {to}, {source}, t, {mask:#010x}, 0xe4;"
        for by, mask, source in steps
    )
    return apart + f"and.b32 {to}, {to}, 0x77777777;"


DECODE4_PTX = tl.constexpr(
    "{ .reg .b32 s, u, l, h; prmt.b32 s, $4, 0, 0x3120;"
    "shr.u32 u, s, 1; and.b32 u, u, 0x77777777; and.b32 s, s, 0x77777777;"
    + _look_up(_LOW4, _HIGH4, "s", "u", 0)
    + "shr.u32 s, s, 16; shr.u32 u, u, 16;"
    + _look_up(_LOW4, _HIGH4, "s", "u", 2)
    + "}"
)
DECODE3_PTX = tl.constexpr(
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
LOW4, HIGH4 = tl.constexpr(_LOW4), tl.constexpr(_HIGH4)
LOW3, HIGH3 = tl.constexpr(_LOW3), tl.constexpr(_HIGH3)
SIZES4, SIZES3 = tl.constexpr(CENTROIDS_4BIT[:8]), tl.constexpr(CENTROIDS_3BIT[:4])
MIDDLES4, MIDDLES3 = tl.constexpr(middles(CENTROIDS_4BIT)), tl.constexpr(middles(CENTROIDS_3BIT))


@triton.jit
def _byte(table, place):
    return (tl.full((), table, tl.int64) >> (8 * place.to(tl.int64))) & 0xFF


@triton.jit
def _centroid(lower, upper, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Returns 2^-16 times the centroids of codes, as float16, by the bits that choose each byte."""
    return float16_of(_byte(LOW, lower) | (_byte(HIGH, upper) << 8))


@triton.jit
def decode4(x, PTX: tl.constexpr):
    """Decodes four centroids per word, as float16 times 2^-16."""
    if PTX:
        return tl.inline_asm_elementwise(
            DECODE4_PTX, "=&r,=&r,=&r,=&r,r", [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    parts = ()
    for i in tl.static_range(4):
        code = (x >> (4 * i)) & 15
        parts = parts + (_centroid(code & 7, code >> 1, LOW4, HIGH4),)
    return parts


@triton.jit
def decode3(x, PTX: tl.constexpr):
    """Decodes eight centroids per word, as float16 times 2^-16."""
    if PTX:
        return tl.inline_asm_elementwise(
            DECODE3_PTX, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [x],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16,
                   tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    parts = ()
    for i in tl.static_range(8):
        code = (x >> (3 * i)) & 7
        parts = parts + (_centroid(code, code, LOW3, HIGH3),)
    return parts


@triton.jit
def product(x, y, PTX: tl.constexpr):
    """Returns x * y, float32, rounded separately, so that a following addition is not fused."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return x * y


@triton.jit
def _length(y, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PTX: tl.constexpr):
    """Returns the square root of rows' sums of squares [ROWS]. Padding zeros change nothing."""
    return tl.sqrt_rn(sum_in_pairs(product(y, y, PTX), ROWS, COLUMNS))


@triton.jit
def sum_in_pairs(sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns sums of rows [ROWS]: adds neighbours, then neighbours of these sums."""
    STAGES: tl.constexpr = COLUMNS.bit_length() - 1
    for stage in tl.static_range(STAGES):
        # Two at a time, in any order. (`tl.split` would make every thread add everything.)
        sums = tl.sum(tl.reshape(sums, (ROWS, COLUMNS >> (stage + 1), 2)), 2)
    return tl.reshape(sums, (ROWS,))


@triton.jit
def encode(
    x, head, there, codes, scales, outer, FORMAT: tl.constexpr, OUTER: tl.constexpr,
    HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    BITS: tl.constexpr = FORMAT.bits
    SIZES: tl.constexpr = SIZES4 if BITS == 4 else SIZES3
    BETWEEN: tl.constexpr = MIDDLES4 if BITS == 4 else MIDDLES3
    z, root, unit, broken = normalised(x, HEAD, PAD, ROWS, PTX)
    size = tl.abs(z)
    code = tl.where(z < 0, 1 << (BITS - 1), 0)
    found = tl.zeros_like(z) + SIZES[0]
    for i in tl.static_range((1 << (BITS - 1)) - 1):
        further = size > BETWEEN[i]
        code += further.to(tl.int32)
        found = tl.where(further, SIZES[i + 1], found)
    # Decoded numbers get the row's length.
    found = tl.where((tl.arange(0, PAD) < HEAD)[None, :], found, 0.0)
    scale = divide(root, _length(found, ROWS, PAD, PTX), PTX) * unit
    store_scaled(codes, scales, there, code, scale, broken, HEAD, PAD, ROWS, BITS)


@triton.jit
def normalised(x, HEAD: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr):
    """Returns rows scaled to about standard normal numbers [ROWS, PAD].

    Length over unit, unit, has NaN [ROWS].
    """
    broken = has_nan(x)
    y = tl.where(broken[:, None], 0.0, widen(x))
    unit = tl.max(tl.abs(y), 1).to(tl.int32, bitcast=True) & 0x7F800000
    unit = unit.to(tl.float32, bitcast=True)
    unit = tl.where(unit < LEAST, LEAST, unit)
    y = divide(y, unit[:, None] + 0.0 * tl.zeros_like(y), PTX)
    y = hadamard(y, ROWS, PAD, HEAD & -HEAD)
    root = _length(y, ROWS, PAD, PTX)
    wide = tl.sqrt_rn(tl.full((), HEAD, tl.float32))
    root_or_one = tl.where(root == 0, 1.0, root)
    z = divide(y * wide, root_or_one[:, None] + 0.0 * tl.zeros_like(y), PTX)
    return z, root, unit, broken


@triton.jit
def store_scaled(
    codes, scales, there, code, scale, broken, HEAD: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Stores codes [ROWS, PAD] and float32 scales [ROWS] as float16; NaN and codes 0 where broken."""
    scale = half(scale)
    code = tl.where(broken[:, None], 0, code)
    store_packed(codes, there, code, HEAD, ROWS, PAD, BITS)
    scale = tl.where(broken, NAN_HALF, scale.to(tl.int16, bitcast=True))
    tl.store(scales, scale.to(tl.int16), mask=there)


def kernels(declared: KVFormat) -> Kernels:
    decode = decode4 if declared.bits == 4 else decode3
    return Kernels(decode, encode, row_scale=load_half_scale, factor=2.0**16)
