"""Dense feed-forward layers and activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.fused.linear import Linear
from kvant.models.fused.recipe import Activation

Apply = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Calls an elementwise function on x [..]."""


def call_directly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns function(x) for x [..]."""
    return function(x)


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense feed-forward layer. up: rows of gates, then of ups; only ups if gated is False.

    activation: a callable on x [..] if the activation has its own weights.
    """

    up: Linear
    down: Linear
    activation: Activation | Callable[[Tensor], Tensor]
    gated: bool = True


def activate(x: Tensor, activation: Activation, call: Apply = call_directly) -> Tensor:
    """Applies an activation to x [..]; rounds where transformers' functions round."""
    return call(_FUNCTIONS[activation], x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: _relu_squared,
}
