"""Matrix products on a GPU: those of long prompts by the algorithms that were measured fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvant.models.fused.cublas_lt import ALIGNMENT, Algorithm, CublasLt
from kvant.models.fused.fastest import fastest, measured_for, measured_rows
from kvant.models.order_of_sums import rows_for, weight_like

_Shape = tuple[torch.dtype, int, int]


class Products:
    """A product x @ weight.T + bias, by `otherwise` until `measure` has found something faster.

    lt: the library that has other ways; None for none.
    """

    def __init__(
        self, lt: CublasLt | None, otherwise: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    ) -> None:
        self._lt, self._otherwise = lt, otherwise
        self._chosen: dict[_Shape, dict[int, Algorithm | None]] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] or None -> [T, out]; float32 sums."""
        algorithm = None if bias is not None else self._algorithm(x, weight)
        if algorithm is not None and self._lt is not None:
            out = x.new_empty(len(x), len(weight))
            if self._lt.multiply(x, weight, out, algorithm):
                return out
        return self._otherwise(x, weight, bias)

    @torch.no_grad()
    def measure(self, weights: Sequence[Tensor], most_rows: int) -> None:
        """Find the fastest ways to multiply x [T, in] with these weights [out, in], T up to most_rows.

        The device must be idle. For weights in 16 bits that lie in one piece.
        """
        for weight in weights:
            shape = weight.dtype, *weight.shape
            narrow = weight.dtype in (torch.float16, torch.bfloat16)
            if self._lt is None or shape in self._chosen or not narrow or not _lies_well(weight):
                continue
            stand_in = weight_like(weight)  # what differs in the order of sums gives other bits
            self._chosen[shape] = {
                rows: fastest(self._lt, rows_for(rows, stand_in, seed=0), stand_in)
                for rows in measured_rows(most_rows)
            }

    def _algorithm(self, x: Tensor, weight: Tensor) -> Algorithm | None:
        chosen = self._chosen.get((weight.dtype, *weight.shape))
        rows = None if chosen is None else measured_for(len(x), chosen)
        if chosen is None or rows is None or not _lies_well(x, weight):
            return None
        return chosen[rows]


def _lies_well(*operands: Tensor) -> bool:
    return all(one.is_contiguous() and one.data_ptr() % ALIGNMENT == 0 for one in operands)
