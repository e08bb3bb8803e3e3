"""Matrix products with stored weights: the decoder's interface, and unquantised and narrow weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvant.weights.codecs import NarrowWeight
from kvant.weights.linear import multiply, rounding_of
from kvant.weights.rounding import RoundedRows, Rounding, Rows

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Multiplies x [T, in] by weight [out, in] and adds bias [out] or None; returns [T, out]."""


class Linear(Protocol):
    """A stored weight [rows, columns], perhaps with a bias, in any format."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product [T, rows] of x [T, columns], in the dtype of x."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """An unquantised weight [rows, columns], and a bias [rows] or None."""

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
        """Implements `Linear.__call__`: x [T, columns] -> [T, rows]."""
        return self.multiply(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class JoinedLater:
    """Unquantised weights [.., columns] of one product, and a bias [rows] or None.

    A weight is joined when it is read, so that a forward that rounds weights holds one wide copy at a time.
    """

    weights: tuple[Tensor, ...]
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """A new tensor [rows, columns]."""
        return torch.cat(self.weights)

    @property
    def rows(self) -> int:
        return sum(weight.shape[0] for weight in self.weights)

    @property
    def columns(self) -> int:
        return self.weights[0].shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """Implements `Linear.__call__`: x [T, columns] -> [T, rows]."""
        return plain(x, self.weight, self.bias)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies as torch does. `join` leaves weights apart for it until they are read."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class NarrowProduct:
    """A weight in a narrow format, and a bias [rows] or None.

    alike: use one kernel for any number of rows, so that no row's result depends on other rows.
    rounds, input_scale, fast_sums: how activations of many rows are rounded and multiplied, see
    `kvant.weights.linear.multiply`.
    """

    weight: NarrowWeight
    bias: Tensor | None
    alike: bool = False
    rounds: bool = False
    input_scale: Tensor | None = None
    fast_sums: bool = False

    @property
    def rows(self) -> int:
        return self.weight.rows

    @property
    def columns(self) -> int:
        return self.weight.columns

    def __call__(self, x: Rows) -> Tensor:
        return multiply(
            x, self.weight, self.bias, alike=self.alike, rounds=self.rounds,
            input_scale=self.input_scale, fast_sums=self.fast_sums,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Apart:
    """Products of one input by weights of different formats; results are concatenated to [T, rows]."""

    parts: tuple[Linear, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    def __call__(self, x: Tensor) -> Tensor:
        """Implements `Linear.__call__`: x [T, columns] -> [T, rows]."""
        return torch.cat([part(x) for part in self.parts], -1)


def apply(linear: Linear, x: Rows) -> Tensor:
    """Multiplies x [T, columns], which is rounded only if `rounding_for` says so; returns [T, rows]."""
    if isinstance(x, RoundedRows):
        assert isinstance(linear, NarrowProduct), (
            "only products of narrow weights read rounded rows"
        )
        return linear(x)
    return linear(x)


def rounding_for(linear: Linear, tokens: int) -> Rounding | None:
    """Returns how the kernel before this product must round `tokens` rows; None if it must not."""
    if not isinstance(linear, NarrowProduct) or not linear.rounds:
        return None
    return rounding_of(linear.weight, tokens, linear.input_scale, fast_sums=linear.fast_sums)


def multiply_for(weight: Tensor) -> Multiply:
    """Returns the product for weights [out, in] on this device.

    On a GPU, single rows have their own kernel.
    """
    if weight.device.type == "cuda":
        from kvant.models.fused.matvec import linear

        return linear
    from torch.nn.functional import linear as torch_linear

    return torch_linear
