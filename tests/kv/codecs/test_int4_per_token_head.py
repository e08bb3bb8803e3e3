"""int4: exact decoding, stable bytes, zero points in the mantissa, attention in rotated space."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvant.kv.codecs import CLAMP
from kvant.kv.codecs.int4_per_token_head import RotatedInt4Codec
from kvant.kv.codecs.rotation import block_length, rotate
from tests.kv.codecs.comparison import same_bytes
from tests.kv.codecs.oracle import unrotated_steps
from tests.strategies import HEAD_DIMS, finite_rows

few = settings(deadline=None, max_examples=100)
CODEC = RotatedInt4Codec()
Planes = tuple[Tensor, Tensor]


def stored(codes: list[int], scale: float, zero_point: int) -> Planes:
    """Planes of one row, built by hand."""
    bits = torch.tensor([[scale]]).view(torch.int32) | zero_point
    packed = [codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]
    return torch.tensor([packed], dtype=torch.uint8), bits.view(torch.float32)


@st.composite
def stored_rows(draw: st.DrawFn) -> tuple[Planes, list[int], float, int]:
    """Bytes as encode writes them where a row uses its whole range: codes 0 and 15 both occur."""
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    rng = draw(st.randoms(use_true_random=False))
    codes = [rng.randrange(16) for _ in range(head_dim)]
    low, high = rng.sample(range(head_dim), 2)
    codes[low], codes[high] = 0, 15
    mantissa = draw(st.integers(0, 2**10 - 1))
    exponent = draw(st.integers(-126, 80))
    scale = (1 + mantissa / 2**10) * 2.0**exponent
    zero_point = draw(st.integers(0, 15))
    return stored(codes, scale, zero_point), codes, scale, zero_point


@few
@given(stored_rows())
def test_decoding_is_exact(row: tuple[Planes, list[int], float, int]) -> None:
    planes, codes, scale, zero_point = row
    steps = unrotated_steps([code - zero_point for code in codes])
    exact = [step * scale / block_length(len(codes)) for step in steps]
    assert CODEC.decode(planes, None, torch.float64).tolist() == [exact]


@few
@given(stored_rows())
def test_bytes_that_use_the_whole_range_survive_decoding_and_encoding(
    row: tuple[Planes, list[int], float, int],
) -> None:
    planes, _, _, _ = row
    decoded = CODEC.decode(planes, None, torch.float32)
    assert same_bytes(CODEC.encode(decoded, None), planes)


@pytest.mark.parametrize("zero_point", range(16))
def test_all_16_codes_mean_their_distance_from_the_zero_point(zero_point: int) -> None:
    planes = stored(list(range(16)), 0.5, zero_point)
    rotated = CODEC.decode_rotated(planes)
    assert rotated.tolist() == [[(code - zero_point) * 0.5 for code in range(16)]]
    found = RotatedInt4Codec().split(planes[1])
    assert [found[0].item(), found[1].item()] == [zero_point, 0.5]


@few
@given(st.sampled_from(HEAD_DIMS).flatmap(finite_rows))
def test_stored_scales_have_11_significant_bits_and_are_normal(x: Tensor) -> None:
    _, scales = CODEC.encode(x, None)
    assert not (scales.view(torch.int32) & 0x1FF0).any()
    assert (RotatedInt4Codec().split(scales)[1] >= 2.0**-126).all()


@pytest.mark.case("A46")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("value", [1.0, -1.0, 3e-5, -448.0, 1e20, -1e-40])
def test_constant_rows_come_back_to_within_the_scale_s_rounding(
    head_dim: int, value: float
) -> None:
    x = torch.full((1, head_dim), value)
    decoded = CODEC.decode(CODEC.encode(x, None), None, torch.float64)
    # A subnormal row: its scale is the smallest, 2^-126, and half a step of it the error.
    tolerance = abs(value) * 2.0**-11 if abs(value) > 2.0**-120 else 2.0**-127
    assert ((decoded - x).abs() <= tolerance).all()


@pytest.mark.case("A44")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_and_sums_in_rotated_space_are_those_of_decoded_rows(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(5)
    k = torch.randn(20, head_dim, generator=generator)
    q = torch.randn(4, head_dim, generator=generator, dtype=torch.float64)
    planes = CODEC.encode(k, None)
    decoded = CODEC.decode(planes, None, torch.float64)
    rotated, block = CODEC.decode_rotated(planes).to(torch.float64), block_length(head_dim)
    torch.testing.assert_close(rotate(q) @ rotated.T / block, q @ decoded.T, rtol=0, atol=1e-10)
    weights = torch.softmax(q @ decoded.T, -1)
    summed = rotate(weights @ rotated) / block
    torch.testing.assert_close(summed, weights @ decoded, rtol=0, atol=1e-12)


def test_an_outlier_costs_less_than_without_rotation() -> None:
    x = torch.randn(100, 128, generator=torch.Generator().manual_seed(6))
    x[:, 17] += 30.0
    decoded = CODEC.decode(CODEC.encode(x, None), None, torch.float32)
    plain_step = (x.amax(-1) - x.amin(-1)) / 15  # what 4 bits over the row itself would step by
    plain_rms = (plain_step.square().mean() / 12).sqrt()
    assert (decoded - x).square().mean().sqrt() < plain_rms / 2


@pytest.mark.case("A46")
def test_the_largest_rows_neither_overflow_nor_lose_their_sign() -> None:
    x = torch.full((2, 512), 3e38)
    x[1, ::2] = -3e38
    decoded = CODEC.decode(CODEC.encode(x, None), None, torch.float32)
    assert ((decoded.abs() / CLAMP - 1).abs() <= 2.0**-11).all()
    assert torch.equal(decoded.sign(), x.sign())
