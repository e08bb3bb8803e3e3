"""float32, float16 and bfloat16 store numbers, converted where dtypes differ."""

from __future__ import annotations

import math

import pytest
import torch

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from tests.kv.codecs.comparison import same_values
from tests.kv.codecs.oracle import BRAIN, HALF

FLOAT16, BFLOAT16 = codec_for(KVDtype.FLOAT16), codec_for(KVDtype.BFLOAT16)


def every_bfloat16() -> torch.Tensor:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).view(-1, 64)


@pytest.mark.case("A07")
def test_bfloat16_numbers_are_converted_to_float16_never_relabelled() -> None:
    x = torch.tensor([[1.0, -2.5, 0.1, 300.0]], dtype=torch.bfloat16)
    (stored,) = FLOAT16.encode(x, None)
    assert stored.dtype is torch.float16
    assert stored.tolist() == [[1.0, -2.5, 0.10009765625, 300.0]]
    assert not torch.equal(stored.view(torch.int16), x.view(torch.int16))
    assert torch.equal(FLOAT16.decode((stored,), None, torch.bfloat16), x)


@pytest.mark.case("A07")
def test_every_finite_bfloat16_becomes_the_nearest_float16_or_the_largest() -> None:
    x = every_bfloat16()
    (stored,) = FLOAT16.encode(x, None)
    codes = stored.view(torch.int16).to(torch.int32) & 0xFFFF
    finite = x.isfinite()
    assert codes[finite].tolist() == [HALF.encode(v) for v in x[finite].tolist()]
    assert torch.equal(stored.isnan(), x.isnan())
    assert not stored.isinf().any()


@pytest.mark.case("A07")
def test_float16_range_is_saturated_on_write_and_on_read() -> None:
    x = torch.tensor([[70000.0, -1e6, 65519.0, 3e38]], dtype=torch.bfloat16)
    (stored,) = FLOAT16.encode(x, None)
    assert stored.tolist() == [[65504.0, -65504.0, 65504.0, 65504.0]]
    (wide,) = BFLOAT16.encode(x, None)
    assert FLOAT16.decode(FLOAT16.encode(x, None), None, torch.float16).isfinite().all()
    read = BFLOAT16.decode((wide,), None, torch.float16)
    assert read.tolist() == [[65504.0, -65504.0, 65504.0, 65504.0]]


def test_every_float16_becomes_the_nearest_bfloat16() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.float16)
    x = x[x.isfinite()].view(-1, 2)
    (stored,) = BFLOAT16.encode(x, None)
    codes = stored.view(torch.int16).to(torch.int32) & 0xFFFF
    assert codes.flatten().tolist() == [BRAIN.encode(v) for v in x.flatten().tolist()]


@pytest.mark.parametrize("dtype", [KVDtype.FLOAT32, KVDtype.FLOAT16, KVDtype.BFLOAT16], ids=str)
def test_a_format_s_own_dtype_comes_back_bit_by_bit(dtype: KVDtype) -> None:
    own = {
        KVDtype.FLOAT32: torch.float32,
        KVDtype.FLOAT16: torch.float16,
        KVDtype.BFLOAT16: torch.bfloat16,
    }[dtype]
    x = every_bfloat16().view(own) if own is not torch.float32 else every_bfloat16().to(own)
    codec = codec_for(dtype)
    assert same_values(codec.decode(codec.encode(x, None), None, own), x)


def test_float32_stores_infinities_and_saturates_wider_numbers() -> None:
    codec, largest = codec_for(KVDtype.FLOAT32), torch.finfo(torch.float32).max
    assert codec.encode(torch.tensor([[math.inf, -math.inf]]), None)[0].tolist() == [
        [math.inf, -math.inf]
    ]
    x = torch.tensor([[1e300, -1e300]], dtype=torch.float64)
    assert codec.encode(x, None)[0].tolist() == [[largest, -largest]]
