"""Matrix products with stored weights: what the decoder calls, and weights that are plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvant.weights.codecs import NarrowWeight
from kvant.weights.linear import multiply, rounding_of
from kvant.weights.rounding import RoundedRows, Rounding, Rows

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, in], weight [out, in], bias [out] or None -> [T, out]."""


class Linear(Protocol):
    """A stored weight [rows, columns], perhaps with a bias, in any format."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, columns] -> [T, rows], in the dtype of x."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A weight [rows, columns] of numbers, and a bias [rows] or None."""

    weight: Tensor
    bias: Tensor | None
    multiply: Multiply

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class NarrowProduct:
    """A weight in a narrow format, and a bias [rows] or None.

    alike: any number of rows is multiplied in one way, so that no row's result depends on others.
    rounds, input_scale: how activations of many rows are rounded, see `kvant.weights.linear.multiply`.
    """

    weight: NarrowWeight
    bias: Tensor | None
    alike: bool = False
    rounds: bool = False
    input_scale: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.rows

    @property
    def columns(self) -> int:
        return self.weight.columns

    def __call__(self, x: Rows) -> Tensor:
        return multiply(
            x, self.weight, self.bias, alike=self.alike, rounds=self.rounds,
            input_scale=self.input_scale,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Apart:
    """Products of one input whose weights have different formats: results [T, rows] beside each other."""

    parts: tuple[Linear, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def apply(linear: Linear, x: Rows) -> Tensor:
    """x [T, columns], rounded only where `rounding_for` says so -> [T, rows]."""
    if isinstance(x, RoundedRows):
        assert isinstance(linear, NarrowProduct), (
            "only products of narrow weights read rounded rows"
        )
        return linear(x)
    return linear(x)


def rounding_for(linear: Linear, tokens: int) -> Rounding | None:
    """Returns how the kernel before this product rounds `tokens` rows for it; None if it does not."""
    if not isinstance(linear, NarrowProduct) or not linear.rounds:
        return None
    return rounding_of(linear.weight, tokens, linear.input_scale)


def multiply_for(weight: Tensor) -> Multiply:
    """Return the product for weights [out, in] on this device; a GPU has a kernel for single rows."""
    if weight.device.type == "cuda":
        from kvant.models.fused.matvec import linear

        return linear
    from torch.nn.functional import linear as torch_linear

    return torch_linear
