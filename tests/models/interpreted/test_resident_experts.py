"""Resident programs give what float64 sums of the pairs' experts give; interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")

from dataclasses import replace

from kvant.models.fused import resident_experts
from kvant.models.fused.experts import Experts, GateOrder
from kvant.models.fused.resident_experts import CopiedTile, CopiedTiles, list_blocks, serves
from kvant.models.fused.routing import Routing
from kvant.models.fused.triton_experts import Choice, TritonExperts

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
pytestmark = [pytest.mark.gpu] if ON_GPU else []


def layer(hidden: int, width: int, count: int, top_k: int) -> Experts:
    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=DEVICE) / 7).to(DTYPE)

    return Experts(
        Routing(count, top_k), (normal(count, hidden), None),
        (normal(count, 2 * width, hidden), None), (normal(count, hidden, width), None),
    )  # fmt: skip


def expected(x: torch.Tensor, choice: Choice, experts: Experts) -> torch.Tensor:
    """The weighted result of each pair, float64 [pairs, H]."""
    ids, top_k = choice.ids.flatten().long(), experts.routing.top_k
    tokens = torch.arange(len(ids), device=x.device) // top_k
    up, down = experts.gate_up[0], experts.down[0]
    assert isinstance(up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    gate, up = torch.einsum("prc,pc->pr", up[ids].double(), x[tokens].double()).chunk(2, 1)
    h = torch.nn.functional.silu(gate) * up
    parts = torch.einsum("prc,pc->pr", down[ids].double(), h)
    return parts * choice.weights.flatten()[:, None].double()


# Blocks that are not full, experts without pairs, rows and columns that tiles do not divide.
@pytest.mark.parametrize("programs", [0, 2])
@pytest.mark.parametrize("tokens", [1, 37])
def test_each_pair_is_multiplied_with_its_expert(tokens: int, programs: int) -> None:
    torch.manual_seed(0)
    experts = layer(48, 40, 6, 2)
    ids = torch.rand(tokens, 5, device=DEVICE).argsort(1)[:, :2]
    choice = Choice(ids.to(torch.int32).contiguous(), torch.rand(tokens, 2, device=DEVICE))
    x, kernels = torch.randn(tokens, 48, device=DEVICE).to(DTYPE), TritonExperts(DEVICE)
    up = CopiedTile(32, 32, 2, 4, programs)
    tiles = CopiedTiles(16, up, replace(up, depth=16))
    parts = kernels.many(x, choice, experts, tiles)
    right = expected(x, choice, experts)
    assert (parts.double() - right).norm() < (1e-2 if ON_GPU else 2e-3) * right.norm()


# Both kinds of tiles that a step gets: for few pairs of an expert, and for many.
@pytest.mark.parametrize("tokens", [300, 900])
def test_steps_on_hopper_get_these_programs(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    experts = layer(256, 192, 8, 2)
    logits = torch.randn(tokens, 8, device=DEVICE).to(DTYPE)
    x, kernels = torch.randn(tokens, 256, device=DEVICE).to(DTYPE), TritonExperts(DEVICE)
    monkeypatch.setattr(kernels, "_copies_tiles", True)
    listed = []
    monkeypatch.setattr(
        resident_experts, "list_blocks",
        lambda *given: listed.append(given[3]) or list_blocks(*given),
    )  # fmt: skip
    choice = kernels.choose(logits, experts)
    parts = kernels.many(x, choice, experts)
    assert listed == [64 if tokens == 300 else 128]
    right = expected(x, choice, experts)
    assert (parts.double() - right).norm() < (1e-2 if ON_GPU else 2e-3) * right.norm()
    assert torch.equal(kernels.apply(x, logits, experts), kernels.combine(parts, x))


def test_only_plain_layers_of_long_aligned_rows_in_16_bits_are_served() -> None:
    experts = layer(72, 64, 6, 2)
    assert serves(experts, DTYPE)
    assert not serves(experts, torch.float32)
    assert not serves(replace(experts, order=GateOrder.ALTERNATING), DTYPE)
    assert not serves(replace(experts, down=(experts.down[0], experts.router[0])), DTYPE)
    assert not serves(layer(72, 56, 6, 2), DTYPE)
    assert not serves(layer(72, 68, 6, 2), DTYPE)  # rows of 136 bytes
