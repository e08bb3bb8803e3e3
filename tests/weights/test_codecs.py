"""Weight formats: golden bytes, sizes, rounding, and joining."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvant.weights.codecs import (
    decode,
    encode,
    encode_in_parts,
    encode_stack,
    join,
    pack_nibbles,
    round_rows,
    unpack_nibbles,
)
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    NVFP4,
    Q4_1,
    Q4_K,
    Q6_K,
    WHOLE,
    Scale,
    WeightFormat,
    int4_groups,
    int8_groups,
)
from kvant.weights.linear import MOST_EXACT, multiply

GOLDEN = {
    FP8_TENSOR: "accec4d23367762c",
    FP8_CHANNEL: "c649e07c025f3bb9",
    FP8_BLOCK: "9ea5eeaf56cec1d1",
    INT8_CHANNEL: "b82e33e9da52dde9",
    int8_groups(32): "483ea0b1e0f3dd7a",
    int4_groups(32): "f315b801158ebbdf",
    int4_groups(128): "20035d57e543283a",
    int4_groups(64, zero_points=True): "cf419027c86f13cf",
    int4_groups(128, scale=Scale.BFLOAT16): "edcfc1f8d6809718",
    MXFP4: "5933848e43e1e8a7",
    NVFP4: "802d1341f015fc0a",
}
"""The first 16 digits of the SHA-256 of all bytes of `_numbers`, by format."""

LARGEST_ERROR = {
    "fp8_e4m3": 2**-4,
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
    "mxfp4": 1 / 4,
    "nvfp4": 1 / 6,
}
"""The largest error of one number, as a share of the largest of its block (fp8: of the number)."""


def _name(fmt: WeightFormat) -> str:
    return fmt.summary.replace(" ", "-")


def _numbers(rows: int = 200, columns: int = 384) -> Tensor:
    """Exactly known numbers of both signs and many sizes, with a row of zeros."""
    index = torch.arange(rows * columns, dtype=torch.int64)
    mixed = (index * 2654435761) % 65521
    found = (mixed.to(torch.float32) - 32760) * 2.0**-20
    found = found.view(rows, columns)
    found[3] = 0.0
    return found


def _digest(fmt: WeightFormat) -> str:
    made = encode(_numbers(), fmt)
    content = b"".join(one.contiguous().view(torch.uint8).numpy().tobytes() for one in made.tensors)
    return hashlib.sha256(content).hexdigest()[:16]


@pytest.mark.parametrize("fmt", GOLDEN, ids=_name)
def test_the_bytes_never_change(fmt: WeightFormat) -> None:
    assert _digest(fmt) == GOLDEN[fmt]


@pytest.mark.parametrize("fmt", GOLDEN, ids=_name)
def test_a_weight_has_the_bytes_that_its_format_counts(fmt: WeightFormat) -> None:
    made = encode(_numbers(), fmt)
    assert made.num_bytes == fmt.matrix_bytes(200, 384)


@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("fmt", [*GOLDEN, Q4_1, Q4_K, Q6_K], ids=_name)
def test_a_weight_without_numbers_has_its_shape_and_counted_bytes(
    fmt: WeightFormat, shape: tuple[int, int]
) -> None:
    made = encode(torch.empty(shape), fmt)
    assert decode(made).shape == shape
    assert made.num_bytes == fmt.matrix_bytes(*shape)
    if fmt.rows != WHOLE and not fmt.global_scale:
        assert encode_in_parts(torch.empty(shape), fmt).num_bytes == made.num_bytes
        assert decode(encode_stack(torch.empty(3, *shape), fmt).one(2)).shape == shape


@pytest.mark.parametrize("fmt", GOLDEN, ids=_name)
def test_rounding_is_as_near_as_the_format_allows(fmt: WeightFormat) -> None:
    weight = _numbers()
    found = decode(encode(weight, fmt))
    if fmt.name == "fp8_e4m3":
        bound = weight.abs() * LARGEST_ERROR[fmt.name] + weight.abs().max() * 2**-17
    else:
        span = weight.abs().max() * (2 if fmt.zero_points else 1)
        bound = torch.full_like(weight, float(span) * LARGEST_ERROR[fmt.name] * 1.01)
    assert bool(((found - weight).abs() <= bound).all())
    assert torch.equal(found[3], weight[3])


@pytest.mark.parametrize("fmt", [f for f in GOLDEN if f.scale is Scale.FLOAT32], ids=_name)
def test_encoding_what_was_decoded_changes_nothing(fmt: WeightFormat) -> None:
    once = decode(encode(_numbers(), fmt))
    assert torch.allclose(decode(encode(once, fmt)), once, rtol=1e-6, atol=0)


@given(st.sampled_from([2, 16, 32, 128]), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_nibbles_come_back(run: int, runs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (3, run * runs), generator=generator, dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes, run), run), codes)


@pytest.mark.parametrize("fmt", [f for f in GOLDEN if not f.global_scale], ids=_name)
def test_joined_weights_are_their_parts(fmt: WeightFormat) -> None:
    weight = _numbers(256)
    parts = [encode(part, fmt) for part in (weight[:128], weight[128:])]
    assert torch.equal(decode(join(parts)), torch.cat([decode(part) for part in parts]))


def test_blocks_that_end_inside_a_part_are_not_joined() -> None:
    parts = [encode(_numbers(100), FP8_BLOCK)] * 2
    with pytest.raises(ValueError, match="blocks that end"):
        join(parts)


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 128 do not divide 384"[:20]):
        encode(_numbers(4, 192), int4_groups(128))


@pytest.mark.parametrize("tokens", [MOST_EXACT, MOST_EXACT + 1])
def test_activations_are_rounded_in_steps_of_many_rows_alone(tokens: int) -> None:
    torch.manual_seed(0)
    weight, x = encode(torch.randn(48, 64), FP8_CHANNEL), torch.randn(tokens, 64)
    x[3] = 0.0
    codes, scales = round_rows(x)
    near = codes.view(torch.float8_e4m3fn).float() * scales
    assert bool(((near - x).abs() <= x.abs() / 16 + x.abs().amax(1, keepdim=True) * 2**-17).all())
    expected = (x if tokens <= MOST_EXACT else near) @ decode(weight).T
    assert torch.equal(multiply(x, weight, None, rounds=True), expected)
    assert torch.equal(multiply(x, weight, None), x @ decode(weight).T)
