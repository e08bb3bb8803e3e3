"""Four significant bits, held to a search through every number of e4m3."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvant.attention.verify.rounded import four_bits

# By code: seven bits, since a sign changes nothing. An odd code has an odd last bit.
NUMBERS = [
    Fraction(code % 8, 512)
    if code < 8
    else Fraction(8 + code % 8) * Fraction(2) ** (code // 8 - 10)
    for code in range(127)
]


def plainly(row: list[float]) -> list[float]:
    """The row with its largest number in (128, 256], each to the nearest number, ties to even codes."""
    largest = max(abs(Fraction(x)) for x in row)
    if not largest:
        return row
    unit = Fraction(1)
    while largest / unit > 256:
        unit *= 2
    while largest / unit <= 128:
        unit /= 2

    def nearest(x: float) -> float:
        wanted = abs(Fraction(x)) / unit
        code = min(range(127), key=lambda i: (abs(NUMBERS[i] - wanted), i % 2))
        return math.copysign(float(NUMBERS[code] * unit), x)

    return [nearest(x) for x in row]


def test_the_list_of_numbers_is_e4m3_s() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert [float(x) for x in NUMBERS] == codes.tolist()


numbers = st.floats(-1e6, 1e6, allow_subnormal=False) | st.integers(-300, 300).map(lambda i: i / 16)


@given(st.lists(numbers, min_size=1, max_size=6))
@example([0.0, 0.0])
@example([1.0, 17 / 16, 19 / 16, 2.0**-15, 3 * 2.0**-18, 2.0**-20])
@example([256.0, 255.9, 128.0])
def test_a_row_is_rounded_to_four_significant_bits_beside_its_largest_number(
    row: list[float],
) -> None:
    found = four_bits(torch.tensor([row], dtype=torch.float64))
    assert found[0].tolist() == plainly(row)


@given(st.lists(numbers, min_size=1, max_size=6), st.integers(-40, 40))
def test_a_power_of_two_changes_no_bit(row: list[float], exponent: int) -> None:
    x = torch.tensor([row], dtype=torch.float64)
    assert torch.equal(four_bits(x * 2.0**exponent), four_bits(x) * 2.0**exponent)
