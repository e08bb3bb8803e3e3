"""The 8-bit floats and e2m1, code by code, against the bit definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvant.kv.codecs import e2m1
from kvant.kv.codecs.float8 import FLOAT8
from kvant.kv.format import Encoding
from tests.kv.codecs import oracle
from tests.kv.codecs.comparison import same_values
from tests.kv.codecs.golden import read_golden_codes

ORACLES = {
    Encoding.E4M3FN: oracle.E4M3FN,
    Encoding.E4M3FNUZ: oracle.E4M3FNUZ,
    Encoding.E5M2: oracle.E5M2,
}
encodings = pytest.mark.parametrize("encoding", FLOAT8, ids=lambda e: e.value)


def every_16_bit_number(dtype: torch.dtype) -> Tensor:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).to(torch.float32)


def hard_float32_numbers() -> Tensor:
    """Random bit patterns, and every code's value and midpoint with both float32 neighbours."""
    rng = np.random.default_rng(7)
    found = [rng.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)]
    for kind in (*ORACLES.values(), oracle.E2M1):
        exact = np.array(kind.magnitudes, dtype=np.float64)
        points = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2]).astype(np.float32)
        around = [
            points,
            np.nextafter(points, np.float32(0)),
            np.nextafter(points, np.float32(9e9)),
        ]
        found += [*around, *(-p for p in around)]
    return torch.from_numpy(np.concatenate(found))


def test_every_encoding_of_a_float8_has_an_oracle() -> None:
    assert ORACLES.keys() == FLOAT8.keys()


@encodings
def test_all_256_codes_mean_what_the_bits_say(encoding: Encoding) -> None:
    decoded = FLOAT8[encoding].decode(torch.arange(256, dtype=torch.uint8))
    exact = torch.tensor([ORACLES[encoding].decode(code) for code in range(256)])
    golden = torch.tensor(read_golden_codes()[encoding])
    assert same_values(decoded, exact)
    assert same_values(decoded, golden)


@encodings
def test_every_finite_code_encodes_to_itself_and_every_nan_to_the_canonical_one(
    encoding: Encoding,
) -> None:
    kind, codes = ORACLES[encoding], torch.arange(256, dtype=torch.uint8)
    back = FLOAT8[encoding].encode(FLOAT8[encoding].decode(codes)).tolist()
    saturated = {c: c - 1 for c in kind.infinite}
    nan = dict.fromkeys(kind.nan, kind.canonical_nan)
    assert back == [{**saturated, **nan}.get(code, code) for code in range(256)]


@encodings
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_rounding_is_to_nearest_even_and_saturates(encoding: Encoding, source: str) -> None:
    x = (
        hard_float32_numbers()
        if source == "float32"
        else every_16_bit_number(getattr(torch, source))
    )
    expected = [ORACLES[encoding].encode(v) for v in x.tolist()]
    assert FLOAT8[encoding].encode(x).tolist() == expected


@pytest.mark.case("A55")
def test_e5m2_is_never_written_as_e4m3() -> None:
    x = torch.tensor([1.0, 448.0, 500.0, 57344.0, 1e6])
    assert FLOAT8[Encoding.E5M2].encode(x).tolist() == [0x3C, 0x5F, 0x60, 0x7B, 0x7B]
    assert FLOAT8[Encoding.E4M3FN].encode(x).tolist() == [0x38, 0x7E, 0x7E, 0x7E, 0x7E]


@encodings
def test_infinities_become_the_largest_finite_value(encoding: Encoding) -> None:
    float8 = FLOAT8[encoding]
    decoded = float8.decode(float8.encode(torch.tensor([math.inf, -math.inf])))
    assert decoded.tolist() == [float8.max, -float8.max]


def test_all_16_codes_of_e2m1_mean_what_the_bits_say_and_encode_to_themselves() -> None:
    values = e2m1.values(torch.device("cpu"))
    exact = torch.tensor([oracle.E2M1.decode(code) for code in range(16)])
    assert same_values(values, exact)
    assert same_values(values, torch.tensor(read_golden_codes()[Encoding.E2M1]))
    assert e2m1.encode(values).tolist() == list(range(16))


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_e2m1_rounds_to_nearest_even_and_saturates(source: str) -> None:
    x = (
        hard_float32_numbers()
        if source == "float32"
        else every_16_bit_number(getattr(torch, source))
    )
    x = x[~x.isnan()]
    assert e2m1.encode(x).tolist() == [oracle.E2M1.encode(v) for v in x.tolist()]
