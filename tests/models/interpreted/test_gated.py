"""Gate, up and activation in one launch give what they give in two; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="triton is not installed here")

from kvant.models.fused.gated import fits, gated

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.gpu] if ON_GPU else []
# The interpreter's bfloat16 is broken.
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float16]
SIZES = [(2050, 512, 384), (4096, 1024, 1280)] if ON_GPU else [(130, 128, 128)]


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def in_two(x: Tensor, weight: Tensor) -> Tensor:
    """In float64, rounded where modules round."""
    both = F.linear(x.double(), weight.double()).to(x.dtype).double()
    gate, up = both.chunk(2, dim=1)
    return F.silu(gate).to(x.dtype).double() * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "into", "width"), SIZES)
def test_one_launch_gives_the_product_and_the_activation(
    rows: int, into: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight = normal(rows, into, dtype=dtype), normal(2 * width, into, dtype=dtype, scale=0.1)
    found, expected = gated(x, weight).double(), in_two(x, weight)
    bound = 2.0 ** (-8 if dtype is torch.bfloat16 else -11)
    assert (found - expected).norm() < bound * expected.norm()
    # A sum that falls on the other side of a rounding moves what follows by a step or two.
    assert ((found - expected).abs() <= 4 * bound * expected.abs() + 1e-5).float().mean() > 0.999


@pytest.mark.skipif(ON_GPU, reason="asks for none")
def test_a_weight_that_does_not_divide_into_tiles_is_left_to_the_library() -> None:
    assert not fits(torch.empty(2 * 100, 64, dtype=torch.float16))
    assert not fits(torch.empty(256, 100, dtype=torch.float16))
    assert not fits(torch.empty(256, 64))
    assert not fits(torch.empty(64, 256, dtype=torch.float16).t())
