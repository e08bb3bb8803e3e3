"""The candidate for products of experts gives what today's kernel gives; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from benchmarks.expert_copies import Copied, multiply, ways

from kvant.models.fused.experts import Experts
from kvant.models.fused.routing import Routing
from kvant.models.fused.triton_experts import Choice, ManyTile, TritonExperts

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
pytestmark = [pytest.mark.gpu] if ON_GPU else []


# Blocks that are not full, experts without pairs, rows and columns that tiles do not divide.
@pytest.mark.parametrize("lasting", [0, 1])
@pytest.mark.parametrize("tokens", [1, 37])
def test_the_candidate_gives_what_many_gives(tokens: int, lasting: int) -> None:
    torch.manual_seed(0)
    hidden, width, count, top_k = 48, 40, 6, 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(DTYPE)

    experts = Experts(
        Routing(count, top_k), (normal(count, hidden), None),
        (normal(count, 2 * width, hidden) / 7, None), (normal(count, hidden, width) / 7, None),
    )  # fmt: skip
    ids = torch.rand(tokens, count - 1, device=DEVICE).argsort(1)[:, :top_k]
    choice = Choice(ids.to(torch.int32).contiguous(), torch.rand(tokens, top_k, device=DEVICE))
    x, kernels = normal(tokens, hidden), TritonExperts(DEVICE)
    how = Copied(ManyTile(16, 32, 32, 2, 4), ManyTile(32, 32, 16, 2, 4), lasting)
    expected = kernels.many(x, choice, experts).double()
    found = multiply(kernels, x, choice, experts, how).double()
    assert (found - expected).norm() < (1e-2 if ON_GPU else 2e-3) * expected.norm()


def test_a_sweep_has_ways_of_both_kinds() -> None:
    for tokens in (512, 8192):
        assert {0, 1} <= {how.lasting for how in ways(tokens)}
