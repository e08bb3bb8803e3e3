"""The assembly that looks centroids up, executed here instruction by instruction."""

from __future__ import annotations

import operator
import random
import re

import pytest

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.attention.triton.formats import turboquant_k
from kvant.kv.codecs.codebook import CENTROIDS_3BIT, CENTROIDS_4BIT


def _prmt(a: int, b: int, selector: int) -> int:
    taken = (a | b << 32).to_bytes(8, "little")
    assert not selector & 0x8888, "the sign of a byte would be spread"
    return int.from_bytes(bytes(taken[selector >> (4 * i) & 7] for i in range(4)), "little")


def _run(assembly: str, inputs: dict[str, int]) -> dict[str, int]:
    registers = dict(inputs)

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in assembly.strip("{ }").split(";"):
        if not line.strip() or ".reg" in line:
            continue
        operation, operands = line.strip().split(" ", 1)
        to, *rest = [part.strip() for part in operands.split(",")]
        if operation == "prmt.b32":
            a, b, c = map(value, rest)
            found = _prmt(a, b, c & 0xFFFF)
        elif operation == "lop3.b32":
            a, b, c, table = map(value, rest)
            assert table == 0xE4
            found = (a & c) | (b & ~c)
        else:
            does = {
                "shl.b32": operator.lshift,
                "shr.u32": operator.rshift,
                "and.b32": operator.and_,
            }
            found = does[operation](*map(value, rest))
        registers[to] = found & 0xFFFFFFFF
    return {name: n for name, n in registers.items() if re.fullmatch(r"\$\d", name)}


def _subnormal(bits: int) -> float:
    """A float16 whose exponent is zero, times 2^16."""
    assert not bits & 0x7C00
    return (-1 if bits & 0x8000 else 1) * (bits & 0x3FF) * 2.0**-8


def test_four_bits_in_two_words_become_their_centroids() -> None:
    random.seed(0)
    for _ in range(200):
        codes = [[random.randrange(16) for _ in range(4)] for _ in range(2)]
        word = sum(c << (16 * w + 4 * e) for w in range(2) for e, c in enumerate(codes[w]))
        found = _run(str(turboquant_k.DECODE4_PTX.value), {"$4": word})
        for e in range(4):
            low, high = found[f"${e}"] & 0xFFFF, found[f"${e}"] >> 16
            assert _subnormal(low) == CENTROIDS_4BIT[codes[0][e]]
            assert _subnormal(high) == CENTROIDS_4BIT[codes[1][e]]


def test_three_bits_in_two_words_with_noise_above_become_their_centroids() -> None:
    random.seed(0)
    for _ in range(200):
        codes = [[random.randrange(8) for _ in range(8)] for _ in range(2)]
        words = [
            sum(c << (3 * e) for e, c in enumerate(row)) | random.randrange(256) << 24
            for row in codes
        ]
        found = _run(str(turboquant_k.DECODE3_PTX.value), {"$8": words[0], "$9": words[1]})
        for e in range(8):
            low, high = found[f"${e}"] & 0xFFFF, found[f"${e}"] >> 16
            assert _subnormal(low) == CENTROIDS_3BIT[codes[0][e]]
            assert _subnormal(high) == CENTROIDS_3BIT[codes[1][e]]
