"""Feed-forward layers of experts: their weights, and their computation in plain torch.

A pair is one token with one of its experts; pair p belongs to token p // top_k.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.fused.feed_forward import Apply, Dense, call_directly
from kvant.models.fused.linear import Linear, Multiply
from kvant.models.fused.routing import Routing, route
from kvant.weights.codecs import NarrowStack, decode


class GateOrder(Enum):
    """Where the rows of gates and ups stand in their joined weight."""

    HALVES = "all gates, then all ups"
    ALTERNATING = "gate 0, up 0, gate 1, up 1, .."


@dataclass(frozen=True, slots=True)
class Clamp:
    """The activation (up + 1) * gate * sigmoid(alpha * gate), gate and up clamped at limit."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Shared:
    """An expert of every token, weighted by the sigmoid of its gate [1, H] -> [T, 1], if it has one."""

    dense: Dense
    gate: Linear | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of one layer. E experts of width I in a model of width H; biases may be None.

    router: [E, H], bias [E]. gate_up: [E, 2 I, H], bias [E, 2 I]. down: [E, H, I], bias [E, H]. Both are
    numbers, or both are narrow.
    clamp: None for silu(gate) * up. shared: None, or what `ExpertKernels` leave to the decoder.
    correction: [E], added to scores in the choice of experts alone.
    """

    routing: Routing
    router: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor | NarrowStack, Tensor | None]
    down: tuple[Tensor | NarrowStack, Tensor | None]
    order: GateOrder = GateOrder.HALVES
    clamp: Clamp | None = None
    shared: Shared | None = None
    correction: Tensor | None = None

    @property
    def width(self) -> int:
        return self.down[0].shape[2]

    @property
    def is_narrow(self) -> bool:
        return isinstance(self.gate_up[0], NarrowStack)


class ExpertKernels(Protocol):
    """Computes layers of experts on one device."""

    def apply(self, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
        """Return the weighted sums of the experts' results [T, H].

        x: [T, H], normalised. logits: [T, E], of the router.
        """
        ...

    def apply_chosen(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """The same for chosen experts: ids, weights [T, top_k]."""
        ...


class TorchExperts:
    """Any device and dtype. Reads the counts of experts on the host.

    multiply: the product of an expert's rows. apply: calls a function of single numbers. With
    batch-invariant ones of both, no token's result depends on the others.
    """

    def __init__(self, multiply: Multiply = F.linear, apply: Apply = call_directly) -> None:
        self._multiply, self._call = multiply, apply

    def apply(self, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
        weights, ids = route(logits, experts.routing, experts.correction)
        return self.apply_chosen(x, ids, weights, experts)

    def apply_chosen(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        top_k = experts.routing.top_k
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.bincount(ids.flatten(), minlength=experts.routing.num_experts).tolist()
        results = x.new_empty(len(order), x.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                pairs = order[start : start + count]
                results[pairs] = self._one_expert(x[pairs // top_k], experts, expert)
                start += count
        # transformers' grouped products round in the same places.
        weighted = results.view(*ids.shape, x.shape[1]) * weights[..., None]
        return reduce(torch.add, weighted.unbind(1)).to(x.dtype)

    def _one_expert(self, x: Tensor, experts: Experts, expert: int) -> Tensor:
        """x: [n, H] -> [n, H]."""
        gate_up = self._multiply(x, *_of(experts.gate_up, expert, x.dtype))
        x = activate_experts(gate_up, experts, self._call)
        return self._multiply(x, *_of(experts.down, expert, x.dtype))


def _of(
    product: tuple[Tensor | NarrowStack, Tensor | None], expert: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """One expert's weight as numbers, and its bias."""
    weight, bias = product
    if bias is not None:
        bias = bias[expert]
    if isinstance(weight, NarrowStack):
        return decode(weight.one(expert), dtype), bias
    return weight[expert], bias


def activate_experts(gate_up: Tensor, experts: Experts, call: Apply = call_directly) -> Tensor:
    """[n, 2 I] -> [n, I]."""
    if experts.order is GateOrder.HALVES:
        gate, up = gate_up.chunk(2, dim=-1)
    else:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    clamp = experts.clamp
    if clamp is None:
        return call(F.silu, gate) * up
    gate = gate.clamp(max=clamp.limit)
    up = up.clamp(min=-clamp.limit, max=clamp.limit)
    return (up + 1) * (gate * call(torch.sigmoid, gate * clamp.alpha))
