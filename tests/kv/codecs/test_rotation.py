"""The block Walsh-Hadamard rotation of int4."""

from __future__ import annotations

import pytest
import torch

from kvant.kv.codecs.rotation import block_length, rotate, unrotate
from tests.kv.codecs.oracle import butterflies, unrotated_steps
from tests.strategies import HEAD_DIMS

dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.case("A44")
def test_blocks_are_the_largest_power_of_two_that_divides_the_head_size() -> None:
    sizes = {64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256, 512: 512, 576: 64, 2: 2, 6: 2}
    assert {d: block_length(d) for d in sizes} == sizes


@dims
@pytest.mark.case("A44")
def test_rotation_multiplies_every_block_with_the_hadamard_matrix(head_dim: int) -> None:
    x = torch.randint(-100, 100, (3, head_dim), generator=torch.Generator().manual_seed(2))
    expected = [unrotated_steps(row) for row in x.tolist()]
    assert rotate(x.to(torch.float32)).tolist() == expected
    assert rotate(x.to(torch.float64)).tolist() == expected


@dims
def test_sums_are_taken_in_the_order_of_the_definition(head_dim: int) -> None:
    x = rows(2, head_dim)
    expected = [butterflies(list(row)) for row in x.numpy()]
    assert rotate(x).tolist() == [[float(v) for v in row] for row in expected]


@dims
def test_unrotating_undoes_rotating(head_dim: int) -> None:
    x = rows(5, 2, head_dim).to(torch.float64)
    torch.testing.assert_close(unrotate(rotate(x)), x, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotate(unrotate(x)), x, rtol=0, atol=1e-13)


@dims
def test_scores_may_be_computed_in_rotated_space(head_dim: int) -> None:
    q, k = rows(7, head_dim).to(torch.float64), rows(7, head_dim).flip(0).to(torch.float64)
    rotated = (rotate(q) * rotate(k)).sum(-1) / block_length(head_dim)
    torch.testing.assert_close(rotated, (q * k).sum(-1), rtol=0, atol=1e-11)


def test_rotation_keeps_shape_dtype_and_input() -> None:
    x = rows(0, 3, 64)
    assert rotate(x).shape == x.shape
    y = rows(2, 3, 64).transpose(0, 1)
    kept = y.clone()
    assert rotate(y).shape == unrotate(y).shape == y.shape
    assert torch.equal(y, kept)
    assert torch.equal(rotate(y), rotate(y.contiguous()))


def test_one_outlier_is_spread_over_its_block_alone() -> None:
    x = torch.zeros(1, 96)
    x[0, 40] = 7.0
    y = rotate(x)[0]
    assert y.abs().tolist() == [0.0] * 32 + [7.0] * 32 + [0.0] * 32
