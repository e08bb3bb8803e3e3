"""nvfp4: block scales, their limits, and the fixed global scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvant.kv.codecs import codec_for
from kvant.kv.dtype import KVDtype
from kvant.kv.nvfp4_scales import NVFP4_GLOBAL_K, NVFP4_GLOBAL_V
from tests.kv.codecs.comparison import same_bytes
from tests.kv.codecs.oracle import E4M3FN
from tests.strategies import finite_rows, outside_scale

few = settings(deadline=None, max_examples=100)
CODEC = codec_for(KVDtype.NVFP4)
ONE = torch.ones(1)
global_scales = outside_scale(KVDtype.NVFP4, 1)


@few
@given(finite_rows(64), global_scales)
@pytest.mark.case("A46")
def test_a_block_has_scale_0_exactly_where_it_is_zero(x: Tensor, scale: Tensor | None) -> None:
    _, scales = CODEC.encode(x, scale)
    zero = (x.reshape(len(x), -1, 16) == 0).all(-1)
    assert torch.equal(scales == 0, zero)


@st.composite
def stored_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Bytes as encode writes them where each block uses its whole range: a code of +-6 occurs."""
    rng = draw(st.randoms(use_true_random=False))
    codes = [rng.randrange(16) for _ in range(64)]
    for start in range(0, 64, 16):
        codes[start + rng.randrange(16)] = rng.choice((7, 15))
    packed = [codes[i] | codes[i + 1] << 4 for i in range(0, 64, 2)]
    scales = draw(st.lists(st.integers(1, 0x7E), min_size=4, max_size=4))
    return torch.tensor([packed], dtype=torch.uint8), torch.tensor([scales], dtype=torch.uint8)


@few
@given(stored_rows(), global_scales)
def test_bytes_that_use_the_whole_range_survive_decoding_and_encoding(
    planes: tuple[Tensor, Tensor], scale: Tensor | None
) -> None:
    decoded = CODEC.decode(planes, scale, torch.float32)
    assert same_bytes(CODEC.encode(decoded, scale), planes)


def test_all_16_codes_of_a_block_under_every_scale_code() -> None:
    packed = torch.tensor([[2 * i | (2 * i + 1) << 4 for i in range(8)]], dtype=torch.uint8)
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for code in range(0x7F):
        scales = torch.tensor([[code]], dtype=torch.uint8)
        step = E4M3FN.decode(code) * 0.25
        expected = [n * step for n in numbers] + [-n * step for n in numbers]
        decoded = CODEC.decode((packed, scales), torch.tensor([0.25]), torch.float64)
        assert decoded.tolist() == [expected]


def test_signs_of_numbers_that_round_to_zero_are_kept_and_those_of_zero_blocks_dropped() -> None:
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([6.0, -6.0, -0.1, -0.0, 0.1])
    x[0, 16:] = -0.0
    packed, scales = CODEC.encode(x, ONE)
    assert packed.tolist() == [[0xF7, 0x88] + [0] * 14]
    assert scales.tolist() == [[0x38, 0]]


@pytest.mark.case("A46")
def test_a_tiny_block_gets_the_smallest_scale_and_a_huge_one_the_largest() -> None:
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 16], x[0, 32] = 1e-30, 1e30, 1.0
    packed, scales = CODEC.encode(x, ONE)
    assert scales.tolist() == [[0x01, 0x7E, E4M3FN.encode(1 / 6)]]
    decoded = CODEC.decode((packed, scales), ONE, torch.float32)
    assert decoded[0, [0, 16]].tolist() == [0.0, 6.0 * 448.0]


def test_neighbouring_blocks_do_not_share_scales() -> None:
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(9))
    before = CODEC.encode(x, ONE)
    x[0, 20] = 1000.0
    after = CODEC.encode(x, ONE)
    changed = (before[1] != after[1]).tolist()
    assert changed == [[False, True, False, False]]
    assert torch.equal(before[0][0, :8], after[0][0, :8])
    assert torch.equal(before[0][0, 16:], after[0][0, 16:])


def test_fixed_global_scales_leave_room_for_the_largest_keys_and_values_known() -> None:
    """Keys of several hundred are known (Qwen2.5's biased heads); values stay far below them."""
    largest = 6 * 448
    assert largest * NVFP4_GLOBAL_K >= 2000
    assert largest * NVFP4_GLOBAL_V >= 100
