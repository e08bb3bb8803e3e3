"""Cells of `kvant verify` for experts with narrow weights: layers against float64 sums of decoded bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.fused.experts import ExpertKernels, Experts, TorchExperts
from kvant.models.fused.routing import Routing
from kvant.weights.codecs import NarrowStack, decode, encode
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8_CHANNEL,
    MXFP4,
    WeightFormat,
    int4_groups,
)
from kvant.weights.linear import rounded_numbers
from kvant.weights.verify import MOST, ROWS, ProductCell

FORMATS = FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL, int4_groups(128), MXFP4
_ROUTING = Routing(16, 4)
_HIDDEN, _WIDTH = 512, 256

_MOST_ROUNDED = 2e-2
"""Maximum relative error where gates are rounded to e4m3.

Hopper's sums of 8-bit floats keep 13 bits behind the largest number, so few gates round to another number of
16 bits, and one in thirty of those to another code, which is at most 1/8 away: an error below 1e-2.
"""


def verify_experts(device: torch.device, dtype: torch.dtype) -> Iterator[ProductCell]:
    """Computes a layer of experts of every format in every way that an engine uses; yields the errors."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def chosen(tokens: int) -> Tensor:
        scores = torch.rand(tokens, _ROUTING.num_experts, device=device, generator=generator)
        return scores.topk(_ROUTING.top_k).indices

    steps = [
        (normal(rows, _HIDDEN).to(dtype), chosen(rows), normal(rows, 4).abs()) for rows in ROWS
    ]
    numbers = normal(16, 2 * _WIDTH, _HIDDEN) * 0.05, normal(16, _HIDDEN, _WIDTH) * 0.05
    for fmt in FORMATS:
        stacks = [NarrowStack(encode(one.flatten(0, 1), fmt), 16) for one in numbers]
        exact = [decode(one.whole, torch.float64).view(one.shape) for one in stacks]
        none = normal(0)
        for way, alike, rounds in _ways(fmt):
            experts = Experts(
                _ROUTING, (none, None), (stacks[0], None), (stacks[1], None), rounds=rounds
            )
            kernels, errors = _kernels(device, alike=alike), []
            for x, ids, weights in steps:
                rounded = fmt if _rounds(kernels, x, experts) else None
                expected = _expected(x, ids, weights, exact, rounded)
                found = kernels.apply_chosen(x, ids, weights, experts).to(torch.float64)
                errors.append(float((found - expected).norm() / expected.norm()))
            most = _MOST_ROUNDED if rounds and dtype is torch.bfloat16 else MOST[dtype]
            yield ProductCell(f"experts, {fmt.summary}", way, tuple(errors), most)


def _ways(fmt: WeightFormat) -> Iterator[tuple[str, bool, bool]]:
    """Yields kinds of products: a name, whether results do not depend on the batch, `Experts.rounds`."""
    yield "fastest", False, False
    yield "batch-invariant", True, False
    if fmt == FP8_BLOCK:
        yield "rounded activations", False, True


def _kernels(device: torch.device, *, alike: bool) -> ExpertKernels:
    if device.type != "cuda":
        return TorchExperts()
    from kvant.models.fused.triton_experts import TritonExperts

    return TritonExperts(device, batch_invariant=alike)


def _rounds(kernels: ExpertKernels, x: Tensor, experts: Experts) -> bool:
    """Whether kernels round activations x [T, H]."""
    if isinstance(kernels, TorchExperts):
        return False
    from kvant.models.fused.triton_experts import TritonExperts

    return isinstance(kernels, TritonExperts) and kernels.rounds(x, experts)


def _expected(
    x: Tensor, ids: Tensor, weights: Tensor, exact: list[Tensor], rounded: WeightFormat | None
) -> Tensor:
    """Returns the sums, float64 [T, H], with gates rounded where kernels round them.

    rounded: activations are rounded for weights of this format.
    """
    seen = x.to(torch.float64) if rounded is None else _rounded(x, rounded)
    total = torch.zeros_like(seen)
    for expert, (up, down) in enumerate(zip(*exact, strict=True)):
        token, place = (ids == expert).nonzero(as_tuple=True)
        gates, ups = (seen[token] @ up.T).to(x.dtype).to(torch.float64).chunk(2, 1)
        h = (F.silu(gates).to(x.dtype).to(torch.float64) * ups).to(x.dtype)
        h = h.to(torch.float64) if rounded is None else _rounded(h, rounded)
        total.index_add_(0, token, (h @ down.T) * weights[token, place, None].to(torch.float64))
    return total


def _rounded(x: Tensor, fmt: WeightFormat) -> Tensor:
    return rounded_numbers(x, fmt).to(torch.float64)
