"""Experts with fp8 weights and activations give float64 sums of the rounded numbers, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed here")


from dataclasses import replace

from kvant.models.fused import resident_experts, rounded_experts
from kvant.models.fused.experts import Clamp, Experts, GateOrder
from kvant.models.fused.rounded_experts import PAIRS, serves
from kvant.models.fused.routing import Routing
from kvant.models.fused.triton_experts import Choice, TritonExperts
from kvant.weights.codecs import NarrowStack, decode, encode, round_groups
from kvant.weights.format import FP8_BLOCK, FP8_CHANNEL
from kvant.weights.rounding import RoundedRows

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
pytestmark = [pytest.mark.gpu] if ON_GPU else []
on_gpu = pytest.mark.skipif(not ON_GPU, reason="no interpreter runs Gluon")
ROUNDED, SUMMED, SCALED = 3e-2, 4e-3, 2e-2
HIDDEN, WIDTH, COUNT, TOP_K = 384, 256, 6, 2


def stack(rows: int, columns: int) -> NarrowStack:
    numbers = torch.randn(COUNT * rows, columns, device=DEVICE) / 7
    return NarrowStack(encode(numbers, FP8_BLOCK), COUNT)


def layer(hidden: int = HIDDEN) -> Experts:
    router = torch.randn(COUNT, hidden, device=DEVICE).to(torch.bfloat16)
    return Experts(
        Routing(COUNT, TOP_K), (router, None), (stack(2 * WIDTH, hidden), None),
        (stack(hidden, WIDTH), None), rounds=True,
    )  # fmt: skip


def rounded(x: torch.Tensor) -> RoundedRows:
    codes, scales = round_groups(x, 128)
    return RoundedRows(codes.view(torch.float8_e4m3fn), scales, torch.bfloat16)


def numbers(x: RoundedRows) -> torch.Tensor:
    return x.codes.to(torch.float64) * x.scales.repeat_interleave(128, 1).to(torch.float64)


def weights(one: torch.Tensor | NarrowStack) -> torch.Tensor:
    assert isinstance(one, NarrowStack)
    return decode(one.whole, torch.float64).view(one.shape)


# Blocks that are not full, or not half full, experts without pairs, and more tiles than programs.
@on_gpu
@pytest.mark.parametrize("hidden", [384, 512])
@pytest.mark.parametrize("tokens", [1, 37, 200, 900])
def test_each_pair_is_multiplied_with_its_expert(tokens: int, hidden: int) -> None:
    torch.manual_seed(0)
    experts, kernels = layer(hidden), TritonExperts(DEVICE)
    ids = torch.rand(tokens, 5, device=DEVICE).argsort(1)[:, :TOP_K]
    choice = Choice(ids.to(torch.int32).contiguous(), torch.rand(tokens, TOP_K, device=DEVICE))
    order, ends = kernels.sort(choice, experts.routing)
    blocks = resident_experts.list_blocks(order, ends, experts.routing, PAIRS, 5, {"AHEAD": False})
    ids, tokens_of = choice.ids.flatten()[order].long(), order.long() // TOP_K

    x = rounded(torch.randn(tokens, hidden, device=DEVICE))
    h = rounded_experts.gate_up(x, experts, blocks)
    sums = torch.einsum("prc,pc->pr", weights(experts.gate_up[0])[ids], numbers(x)[tokens_of])
    gate, up = sums.chunk(2, 1)
    right = torch.nn.functional.silu(gate) * up
    assert (numbers(h) - right).norm() < ROUNDED * right.norm()
    most = right.view(-1, 128).abs().amax(1) / 448
    assert torch.allclose(h.scales.double().view(-1), most, rtol=SCALED)

    h = rounded(torch.randn(len(order), WIDTH, device=DEVICE))
    sums = torch.einsum("prc,pc->pr", weights(experts.down[0])[ids], numbers(h))
    right = sums * choice.weights.flatten()[order.long()][:, None].double()
    made = rounded_experts.down(h, experts, blocks, choice.weights)
    assert (made[order.long()].double() - right).norm() < SUMMED * right.norm()


def test_steps_of_many_tokens_round_if_the_layer_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, kernels = layer(), TritonExperts(DEVICE)
    monkeypatch.setattr(kernels, "_copies_tiles", True)
    x = torch.randn(65, HIDDEN, device=DEVICE).to(torch.bfloat16)
    assert kernels.rounds(x, experts)
    assert not kernels.rounds(x[:64], experts)
    assert not kernels.rounds(x, replace(experts, rounds=False))
    assert not TritonExperts(DEVICE, batch_invariant=True).rounds(x, experts)


@on_gpu
def test_what_rounds_is_what_runs() -> None:
    torch.manual_seed(0)
    experts, kernels = layer(), TritonExperts(DEVICE)
    x = torch.randn(65, HIDDEN, device=DEVICE).to(torch.bfloat16)
    logits = torch.randn(65, COUNT, device=DEVICE).to(torch.bfloat16)
    parts = kernels.rounded(x, kernels.choose(logits, experts), experts)
    assert torch.equal(kernels.apply(x, logits, experts), kernels.combine(parts, x))


def test_only_plain_layers_in_whole_blocks_are_served() -> None:
    experts = layer()
    assert serves(experts, torch.bfloat16)
    assert not serves(experts, torch.float16)
    assert not serves(replace(experts, order=GateOrder.ALTERNATING), torch.bfloat16)
    assert not serves(replace(experts, clamp=Clamp(7.0, 1.7)), torch.bfloat16)
    biased = experts.down[0], experts.router[0]
    assert not serves(replace(experts, down=biased), torch.bfloat16)
    rows = encode(torch.randn(COUNT * HIDDEN, WIDTH, device=DEVICE), FP8_CHANNEL)
    assert not serves(replace(experts, down=(NarrowStack(rows, COUNT), None)), torch.bfloat16)
    short = NarrowStack(encode(torch.randn(COUNT * 192, WIDTH, device=DEVICE), FP8_BLOCK), COUNT)
    assert not serves(replace(experts, down=(short, None)), torch.bfloat16)
