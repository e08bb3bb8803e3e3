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

from kvant.models.forward import ExpertBytes
from kvant.models.fused.feed_forward import Apply, Dense, call_directly
from kvant.models.fused.linear import Linear, Multiply
from kvant.models.fused.routing import Routing, route
from kvant.weights.codecs import NarrowStack, decode


class GateOrder(Enum):
    """The order of the rows of gates and ups in their joined weight."""

    HALVES = "all gates, then all ups"
    ALTERNATING = "gate 0, up 0, gate 1, up 1, .."


@dataclass(frozen=True, slots=True)
class Clamp:
    """The activation (up + 1) * gate * sigmoid(alpha * gate), gate and up clamped at limit."""

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Shared:
    """An expert that every token uses.

    gate: weight [1, H]; its sigmoid [T, 1] scales the result; None for 1.
    """

    dense: Dense
    gate: Linear | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of one layer. E experts of width I in a model of width H; biases may be None.

    router: [E, H], bias [E]. gate_up: [E, 2 I, H], bias [E, 2 I]. down: [E, H, I], bias [E, H]. gate_up and
    down are both unquantised, or both in narrow formats. clamp: None for silu(gate) * up.
    shared: an expert of all tokens, which the decoder computes itself. correction: [E], added to scores when
    experts are chosen, not to their weights. rounds: activations of many rows are rounded where kernels take
    them, see `kvant.weights.linear.multiply`.
    """

    routing: Routing
    router: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor | NarrowStack, Tensor | None]
    down: tuple[Tensor | NarrowStack, Tensor | None]
    order: GateOrder = GateOrder.HALVES
    clamp: Clamp | None = None
    shared: Shared | None = None
    correction: Tensor | None = None
    rounds: bool = False

    @property
    def width(self) -> int:
        return self.down[0].shape[2]

    @property
    def is_narrow(self) -> bool:
        return isinstance(self.gate_up[0], NarrowStack)

    @property
    def bytes(self) -> ExpertBytes:
        """Bytes of both products and their biases."""
        tensors = [one for one in (*self.gate_up, *self.down) if one is not None]
        held = sum(
            one.whole.num_bytes if isinstance(one, NarrowStack) else one.nbytes for one in tensors
        )
        return ExpertBytes(self.routing.num_experts, self.routing.top_k, held)


class ExpertKernels(Protocol):
    """Computes layers of experts on one device."""

    def apply(self, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
        """Routes tokens and returns the weighted sums of their experts' results [T, H].

        x: [T, H], normalised. logits: [T, E], of the router.
        """
        ...

    def apply_chosen(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """Returns the sums [T, H] for experts that are chosen already.

        x: [T, H]. ids, weights: [T, top_k].
        """
        ...


class TorchExperts:
    """Plain torch for any device and dtype. Reads the number of tokens of each expert on the host.

    multiply: the product of an expert's rows. apply: calls an elementwise function. If both are
    batch-invariant, no token's result depends on other tokens.
    """

    def __init__(self, multiply: Multiply = F.linear, apply: Apply = call_directly) -> None:
        self._multiply, self._call = multiply, apply

    def apply(self, x: Tensor, logits: Tensor, experts: Experts) -> Tensor:
        """Implements `ExpertKernels.apply`: x [T, H], logits [T, E] -> [T, H]."""
        weights, ids = route(logits, experts.routing, experts.correction)
        return self.apply_chosen(x, ids, weights, experts)

    def apply_chosen(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """Implements `ExpertKernels.apply_chosen`: x [T, H], ids and weights [T, top_k] -> [T, H]."""
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
        # transformers' grouped products round at this point too.
        weighted = results.view(*ids.shape, x.shape[1]) * weights[..., None]
        return reduce(torch.add, weighted.unbind(1)).to(x.dtype)

    def _one_expert(self, x: Tensor, experts: Experts, expert: int) -> Tensor:
        """Runs one expert: x [n, H] -> [n, H]."""
        gate_up = self._multiply(x, *_of(experts.gate_up, expert, x.dtype))
        x = activate_experts(gate_up, experts, self._call)
        return self._multiply(x, *_of(experts.down, expert, x.dtype))


def _of(
    product: tuple[Tensor | NarrowStack, Tensor | None], expert: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Returns one expert's unquantised weight, and its bias."""
    weight, bias = product
    if bias is not None:
        bias = bias[expert]
    if isinstance(weight, NarrowStack):
        return decode(weight.one(expert), dtype), bias
    return weight[expert], bias


def activate_experts(gate_up: Tensor, experts: Experts, call: Apply = call_directly) -> Tensor:
    """Returns activation(gate) * up, [n, I], of gate_up [n, 2 I]."""
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
