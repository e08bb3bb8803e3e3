"""Matrix products with stored weights: what the decoder calls, and weights that are plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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


def multiply_for(weight: Tensor) -> Multiply:
    """Return the product for weights [out, in] on this device; a GPU has a kernel for single rows."""
    if weight.device.type == "cuda":
        from kvant.models.fused.matvec import linear

        return linear
    from torch.nn.functional import linear as torch_linear

    return torch_linear
