"""A second, slow definition of every KV format, written from the bit layouts in docs/formats.md.

Shares no code with `kvant.kv.codecs` and does not use torch: number encodings are tables of exact
fractions, each float32 operation is one numpy scalar operation, rows are handled one by one.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from kvant.kv.dtype import KVDtype

CLAMP = np.float32(2.0**100)
SMALLEST_NORMAL = np.float32(2.0**-126)
CANONICAL_NAN = bytes.fromhex("0000c07f")


@dataclass(frozen=True)
class MiniFloat:
    """A sign, exponent and mantissa in `bits` bits; some codes mean NaN or infinity instead."""

    bits: int
    mantissa_bits: int
    bias: int
    nan: frozenset[int]
    infinite: frozenset[int] = frozenset()
    canonical_nan: int = 0
    negative_zero: bool = True

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    def number(self, code: int) -> Fraction | None:
        """The exact number of a code; None for NaN and infinities."""
        if code in self.nan or code in self.infinite:
            return None
        magnitude = code & (self.sign - 1)
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        significand = Fraction(mantissa, 1 << self.mantissa_bits)
        if exponent == 0:
            value = significand * Fraction(2) ** (1 - self.bias)
        else:
            value = (1 + significand) * Fraction(2) ** (exponent - self.bias)
        return -value if code & self.sign else value

    def decode(self, code: int) -> float:
        if code in self.nan:
            return math.nan
        if code in self.infinite:
            return -math.inf if code & self.sign else math.inf
        number = self.number(code)
        assert number is not None
        return math.copysign(float(number), -1.0 if code & self.sign else 1.0)

    @cached_property
    def magnitudes(self) -> list[float]:
        """Finite non-negative values by code; every format's fit a double exactly."""
        found = [self.number(code) for code in range(self.sign)]
        return [float(n) for n in found if n is not None]

    def encode(self, x: float) -> int:
        """Nearest code, ties to the even code, saturating; x is taken exactly."""
        if math.isnan(x):
            return self.canonical_nan
        size, table = abs(x), self.magnitudes
        if size >= table[-1]:
            code = len(table) - 1
        else:
            above = bisect_left(table, size)
            code = above
            if table[above] != size:
                below = above - 1
                # Halves and sums of neighbouring table values are exact in a double.
                middle = (table[below] + table[above]) / 2
                if size < middle or (size == middle and below % 2 == 0):
                    code = below
        if math.copysign(1.0, x) < 0 and (code or self.negative_zero):
            code |= self.sign
        return code


E4M3FN = MiniFloat(8, 3, 7, nan=frozenset({0x7F, 0xFF}), canonical_nan=0x7F)
E4M3FNUZ = MiniFloat(8, 3, 8, nan=frozenset({0x80}), canonical_nan=0x80, negative_zero=False)
E5M2 = MiniFloat(
    8,
    2,
    15,
    nan=frozenset({0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}),
    infinite=frozenset({0x7C, 0xFC}),
    canonical_nan=0x7F,
)
E2M1 = MiniFloat(4, 1, 1, nan=frozenset())
HALF = MiniFloat(16, 10, 15, frozenset(range(0x7C01, 0x8000)), frozenset({0x7C00}), 0x7E00)
BRAIN = MiniFloat(16, 7, 127, frozenset(range(0x7F81, 0x8000)), frozenset({0x7F80}), 0x7FC0)


@dataclass(frozen=True)
class Row:
    """One encoded row: the bytes of each plane, and the values they decode to."""

    planes: tuple[bytes, ...]
    values: list[float]


def _float32_bytes(value: np.float32) -> bytes:
    return CANONICAL_NAN if np.isnan(value) else value.astype("<f4").tobytes()


def _clamped(x: Sequence[float]) -> list[np.float32]:
    with np.errstate(over="ignore"):
        row = [np.float32(v) for v in x]
    return [v if np.isnan(v) else min(max(v, -CLAMP), CLAMP) for v in row]


def _absmax(row: Sequence[np.float32]) -> np.float32:
    return np.float32(np.nan) if any(np.isnan(v) for v in row) else max(abs(v) for v in row)


def _row_scale(span: np.float32, steps: int) -> np.float32:
    return span if np.isnan(span) else max(span / np.float32(steps), SMALLEST_NORMAL)


def _nearest(x: np.float32) -> int:
    """Nearest integer, ties to even, by exact arithmetic."""
    return round(Fraction(float(x)))


def float32(x: Sequence[float], scale: float) -> Row:
    row = [np.float32(v) for v in x]
    return Row((b"".join(v.astype("<f4").tobytes() for v in row),), [float(v) for v in row])


def two_byte_float(kind: MiniFloat) -> Callable[[Sequence[float], float], Row]:
    def encode(x: Sequence[float], scale: float) -> Row:
        codes = [kind.encode(float(np.float32(v))) for v in x]
        plane = b"".join(code.to_bytes(2, "little") for code in codes)
        return Row((plane,), [kind.decode(code) for code in codes])

    return encode


def scaled_float8(kind: MiniFloat) -> Callable[[Sequence[float], float], Row]:
    def encode(x: Sequence[float], scale: float) -> Row:
        outside = np.float32(scale)
        codes = [kind.encode(float(v / outside)) for v in _clamped(x)]
        values = [float(np.float32(kind.decode(c)) * outside) for c in codes]
        return Row((bytes(codes),), values)

    return encode


def fp8_per_token_head(x: Sequence[float], scale: float) -> Row:
    row = _clamped(x)
    own = _row_scale(_absmax(row), 448)
    codes = [E4M3FN.encode(float(v / own)) for v in row]
    values = [float(np.float32(E4M3FN.decode(c)) * own) for c in codes]
    return Row((bytes(codes), _float32_bytes(own)), values)


def int8_per_token_head(x: Sequence[float], scale: float) -> Row:
    row = _clamped(x)
    own = _row_scale(_absmax(row), 127)
    if np.isnan(own):
        return Row((bytes(len(row)), CANONICAL_NAN), [math.nan] * len(row))
    codes = [min(max(_nearest(v / own), -127), 127) for v in row]
    values = [float(np.float32(c) * own) for c in codes]
    return Row((bytes(c & 0xFF for c in codes), _float32_bytes(own)), values)


def butterflies(row: Sequence[np.float32]) -> list[np.float32]:
    """The rotation in float32, in place, block after block, strides 1, 2, 4, .."""
    y, block = list(row), 1
    while len(y) % (2 * block) == 0:
        block *= 2
    stride = 1
    while stride < block:
        for j in range(len(y)):
            if not j & stride:
                y[j], y[j + stride] = y[j] + y[j + stride], y[j] - y[j + stride]
        stride *= 2
    return y


def unrotated_steps(steps: Sequence[int]) -> list[int]:
    """Integers times H by its definition, H[i, j] = (-1)^(ones in i & j), in every block."""
    block = len(steps) & -len(steps)
    odd = [[(i & j).bit_count() % 2 for j in range(block)] for i in range(block)]
    found = []
    for start in range(0, len(steps), block):
        part = steps[start : start + block]
        found += [sum(-s if o else s for s, o in zip(part, row, strict=True)) for row in odd]
    return found


def int4_per_token_head(x: Sequence[float], scale: float) -> Row:
    y = butterflies(_clamped(x))
    if any(np.isnan(v) for v in y):
        return Row((bytes(len(y) // 2), CANONICAL_NAN), [math.nan] * len(y))
    zero = np.float32(0)
    low, high = min([*y, zero]), max([*y, zero])
    own = max((high - low) / np.float32(15), SMALLEST_NORMAL)
    # 11 significant bits, ties upwards
    mantissa, exponent = math.frexp(float(own))
    own = np.float32(math.ldexp(math.floor(mantissa * 2048 + 0.5), exponent - 11))
    zero_point = min(max(_nearest(-low / own), 0), 15)
    codes = [min(max(_nearest(v / own) + zero_point, 0), 15) for v in y]
    packed = bytes(codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2))
    stored = int.from_bytes(_float32_bytes(own), "little") + zero_point
    steps = unrotated_steps([code - zero_point for code in codes])
    block = len(codes) & -len(codes)
    values = [float(step * Fraction(float(own)) / block) for step in steps]
    return Row((packed, stored.to_bytes(4, "little")), values)


def int4_short(x: Sequence[float], scale: float) -> Row:
    """As int4_per_token_head, with a scale of 7 significant bits within 2^-41 .. 2^22 * 127 / 64."""
    y = butterflies(_clamped(x))
    if any(np.isnan(v) for v in y):
        return Row((bytes(len(y) // 2), (0xFFF0).to_bytes(2, "little")), [math.nan] * len(y))
    zero = np.float32(0)
    low, high = min([*y, zero]), max([*y, zero])
    own = max((high - low) / np.float32(15), np.float32(2.0**-41))
    own = min(own, np.float32(2.0**22 * (1 + 62 / 64)))
    mantissa, exponent = math.frexp(float(own))
    own = np.float32(math.ldexp(math.floor(mantissa * 128 + 0.5), exponent - 7))
    mantissa, exponent = math.frexp(float(own))
    stored = (exponent - 1 + 41) * 64 + int((mantissa * 2 - 1) * 64)
    with np.errstate(over="ignore"):
        zero_point = _steps(-low / own, 0)
        codes = [_steps(v / own, zero_point) for v in y]
    steps = unrotated_steps([code - zero_point for code in codes])
    block = len(codes) & -len(codes)
    values = [float(step * Fraction(float(own)) / block) for step in steps]
    word = 16 * stored + zero_point
    return Row((bits_packed(codes, 4), word.to_bytes(2, "little")), values)


def _steps(x: np.float32, zero_point: int) -> int:
    return min(max(_nearest(x) + zero_point, 0), 15)


def int4_feedback(x: Sequence[float], matrix: Sequence[Sequence[float]]) -> Row:
    """int4_per_token_head's row, whose codes are found one after another."""
    plain = int4_per_token_head(x, 1.0)
    y = butterflies(_clamped(x))
    if any(np.isnan(v) for v in y):
        return plain
    stored = int.from_bytes(plain.planes[1], "little")
    zero_point = stored & 15
    own = np.frombuffer((stored - zero_point).to_bytes(4, "little"), "<f4")[0]
    wanted, codes = list(y), []
    for i in range(len(y)):
        code = min(max(_nearest(wanted[i] / own) + zero_point, 0), 15)
        codes.append(code)
        error = y[i] - np.float32(code - zero_point) * own
        for j in range(i + 1, len(y)):
            wanted[j] = wanted[j] + error * np.float32(matrix[i][j])
    packed = bytes(codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2))
    steps = unrotated_steps([code - zero_point for code in codes])
    block = len(codes) & -len(codes)
    values = [float(step * Fraction(float(own)) / block) for step in steps]
    return Row((packed, plain.planes[1]), values)


def nvfp4(x: Sequence[float], scale: float) -> Row:
    row, outer = _clamped(x), np.float32(scale)
    codes: list[int] = []
    scale_codes: list[int] = []
    values: list[float] = []
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        amax = _absmax(block)
        scale_code = E4M3FN.encode(float((amax / np.float32(6)) / outer))
        if amax > 0 and scale_code == 0:
            scale_code = 1
        step = np.float32(E4M3FN.decode(scale_code)) * outer
        ordinary = amax > 0  # neither zero nor NaN
        found = [E2M1.encode(float(v / step)) if ordinary else 0 for v in block]
        codes += found
        scale_codes.append(scale_code)
        values += [float(np.float32(E2M1.decode(c)) * step) for c in found]
    packed = bytes(codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2))
    return Row((packed, bytes(scale_codes)), values)


def bits_packed(codes: Sequence[int], bits: int) -> bytes:
    """Code i from bit i * bits on, least significant first."""
    number = sum(code << (i * bits) for i, code in enumerate(codes))
    return number.to_bytes(len(codes) * bits // 8, "little")


def tree_sum(squares: Sequence[np.float32]) -> np.float32:
    sums = list(squares)
    while len(sums) > 1:
        added = [sums[i] + sums[i + 1] for i in range(0, len(sums) - 1, 2)]
        sums = added + sums[2 * len(added) :]
    return sums[0]


HALF_NAN = bytes.fromhex("007e")
LEVELS = {4: (33, 99, 168, 241, 322, 414, 530, 700), 3: (63, 194, 344, 551)}  # in 256ths


def _half_bytes(number: float) -> tuple[bytes, np.float32]:
    code = HALF.encode(number)
    return code.to_bytes(2, "little"), np.float32(HALF.decode(code))


def turboquant_k(bits: int) -> Callable[[Sequence[float], float], Row]:
    levels = [Fraction(level, 256) for level in LEVELS[bits]]

    def nearest(z: np.float32) -> int:
        size = abs(Fraction(float(z)))
        code = sum(size > (a + b) / 2 for a, b in itertools.pairwise(levels))
        return code + (len(levels) if z < 0 else 0)

    def encode(x: Sequence[float], scale: float) -> Row:
        row = _clamped(x)
        n, largest = len(row), _absmax(row)
        if np.isnan(largest):
            return Row((bytes(n * bits // 8), HALF_NAN), [math.nan] * n)
        unit = SMALLEST_NORMAL
        if largest >= SMALLEST_NORMAL:
            unit = np.float32(2.0 ** (math.frexp(float(largest))[1] - 1))
        y = butterflies([v / unit for v in row])
        root = np.sqrt(tree_sum([v * v for v in y]))
        wide = np.float32(math.sqrt(n))
        codes = [nearest((v * wide) / root) if root > 0 else 0 for v in y]
        signed = [*levels, *(-level for level in levels)]
        found = [np.float32(float(signed[code])) for code in codes]
        with np.errstate(over="ignore"):
            exact = (root / np.sqrt(tree_sum([c * c for c in found]))) * unit
        stored, own = _half_bytes(float(exact))
        block = np.float32(n & -n)
        values = [float(v / block) for v in butterflies([c * own for c in found])]
        return Row((bits_packed(codes, bits), stored), values)

    return encode


def normal2(x: Sequence[float], scale: float) -> Row:
    row = _clamped(x)
    n, largest = len(row), _absmax(row)
    if np.isnan(largest):
        return Row((bytes(n // 4), HALF_NAN), [math.nan] * n)
    unit = SMALLEST_NORMAL
    if largest >= SMALLEST_NORMAL:
        unit = np.float32(2.0 ** (math.frexp(float(largest))[1] - 1))
    y = butterflies([v / unit for v in row])
    root = np.sqrt(tree_sum([v * v for v in y]))
    wide = np.float32(math.sqrt(n))
    codes, products = [], []
    for v in y:
        z = (v * wide) / root if root > 0 else np.float32(0)
        far = int(abs(Fraction(float(z))) > Fraction(255, 256))
        codes.append(1 - far if z < 0 else 2 + far)
        products.append(np.float32(2 * abs(codes[-1] - 1.5)) * abs(z))
    found = [np.float32(code - 1.5) for code in codes]
    exact = np.float32(0)
    with np.errstate(over="ignore"):
        if root > 0:
            exact = ((root * wide * np.float32(2)) / tree_sum(products)) * unit
    stored, own = _half_bytes(float(exact))
    block = np.float32(n & -n)
    values = [float(v / block) for v in butterflies([c * own for c in found])]
    return Row((bits_packed(codes, 2), stored), values)


def turboquant_v(bits: int) -> Callable[[Sequence[float], float], Row]:
    most = (1 << bits) - 1

    def encode(x: Sequence[float], scale: float) -> Row:
        row = _clamped(x)
        if any(np.isnan(v) for v in row):
            return Row((bytes(len(row) * bits // 8), HALF_NAN + bytes(2)), [math.nan] * len(row))
        low_bytes, low = _half_bytes(float(min(row)))
        if low == 0:
            low_bytes = bytes(2)
        span = max(max(row) - low, np.float32(0))
        step_bytes, step = _half_bytes(float(span / np.float32(most)))
        if step == 0:
            step_bytes = bytes(2)
        codes = [min(max(_nearest((v - low) / step), 0), most) if step > 0 else 0 for v in row]
        values = [float(np.float32(code) * step + low) for code in codes]
        return Row((bits_packed(codes, bits), step_bytes + low_bytes), values)

    return encode


ENCODE_ROW: dict[KVDtype, Callable[[Sequence[float], float], Row]] = {
    KVDtype.FLOAT32: float32,
    KVDtype.FLOAT16: two_byte_float(HALF),
    KVDtype.BFLOAT16: two_byte_float(BRAIN),
    KVDtype.FP8_E4M3: scaled_float8(E4M3FN),
    KVDtype.FP8_E4M3FNUZ: scaled_float8(E4M3FNUZ),
    KVDtype.FP8_E5M2: scaled_float8(E5M2),  # scale 1.0
    KVDtype.FP8_PER_TOKEN_HEAD: fp8_per_token_head,
    KVDtype.INT8_PER_TOKEN_HEAD: int8_per_token_head,
    KVDtype.INT4_PER_TOKEN_HEAD: int4_per_token_head,
    KVDtype.INT4_FEEDBACK: int4_per_token_head,  # matrices of zeros
    KVDtype.INT4_SHORT: int4_short,
    KVDtype.INT4_SHORT_FEEDBACK: int4_short,  # matrices of zeros
    KVDtype.NORMAL2: normal2,
    KVDtype.NVFP4: nvfp4,
    KVDtype.TURBOQUANT_K8: scaled_float8(E4M3FN),  # scale 1.0
    KVDtype.TURBOQUANT_K4: turboquant_k(4),
    KVDtype.TURBOQUANT_K3: turboquant_k(3),
    KVDtype.TURBOQUANT_V4: turboquant_v(4),
    KVDtype.TURBOQUANT_V3: turboquant_v(3),
}
