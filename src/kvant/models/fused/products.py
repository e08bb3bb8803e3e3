"""Matrix products on a GPU: of one row by a kernel of our own, of many by what was measured fastest.

The library that multiplies for torch has several algorithms for a product and chooses by rules. For
prompts another one takes 3 to 9 % less time on an H200, with the same bits; `measure` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.fused.cublas_lt import ALIGNMENT, Algorithm, CublasLt, library
from kvant.models.fused.matvec import linear
from kvant.models.order_of_sums import rows_for, weight_like

_FEWEST, _MOST = 1024, 16384
"""Rows that are measured: with fewer the ways differ little, and with every number of them."""
_WORTH = 0.99
"""Of the time of torch's: what is not faster than that is not taken."""
_CANDIDATES, _ROUNDS = 4, 5
_ENOUGH = 1.0
"""Milliseconds that one reading takes, at least."""

_Shape = tuple[torch.dtype, int, int]


class Products:
    """`torch.nn.functional.linear` of contiguous weights, with the same bits in what was measured."""

    def __init__(self) -> None:
        self._chosen: dict[_Shape, dict[int, Algorithm | None]] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] or None -> [T, out]; float32 sums."""
        chosen = self._chosen.get((weight.dtype, *weight.shape))
        if chosen and 4 * len(x) >= 3 * _FEWEST and bias is None and _lies_well(x, weight):
            algorithm = chosen[nearest(len(x), chosen)]
            lt = library()
            if algorithm is not None and lt is not None:
                out = x.new_empty(len(x), len(weight))
                if lt.multiply(x, weight, out, algorithm):
                    return out
        return linear(x, weight, bias)

    @torch.no_grad()
    def measure(self, weights: Sequence[Tensor], most_rows: int) -> None:
        """Time the products of x [T, in] with these weights [out, in], for T up to most_rows.

        The device must be idle. Weights in 16 bits; others stay with torch.
        """
        lt = library()
        for weight in weights:
            shape = weight.dtype, *weight.shape
            narrow = weight.dtype in (torch.float16, torch.bfloat16)
            if lt is None or shape in self._chosen or not narrow or not _lies_well(weight):
                continue
            stand_in = weight_like(weight)
            self._chosen[shape] = {
                rows: _fastest(lt, rows_for(rows, stand_in, seed=0), stand_in)
                for rows in measured_rows(most_rows)
            }


def measured_rows(most: int) -> list[int]:
    """Powers of two up to a step's most."""
    found = []
    rows = _FEWEST
    while rows <= min(most, _MOST):
        found.append(rows)
        rows *= 2
    return found


def nearest(rows: int, measured: Mapping[int, object]) -> int:
    """The number of rows that was measured and is most like this one, by ratio."""
    return min(measured, key=lambda one: max(one / rows, rows / one))


def best(times: Sequence[Sequence[float]]) -> int:
    """Whose median is least; the first where none is less by one per cent."""
    medians = [median(one) for one in times]
    least = min(range(len(times)), key=medians.__getitem__)
    return least if medians[least] < _WORTH * medians[0] else 0


def _fastest(lt: CublasLt, x: Tensor, weight: Tensor) -> Algorithm | None:
    """The algorithm that takes less time than torch's and gives its bits; None where none does."""
    expected = F.linear(x, weight)
    out = torch.empty_like(expected)

    def by(algorithm: Algorithm) -> Callable[[], object]:
        return lambda: lt.multiply(x, weight, out, algorithm)

    def roughly(algorithm: Algorithm) -> float:
        runs = lt.multiply(x, weight, out, algorithm)
        return _milliseconds(by(algorithm), 2) if runs else math.inf

    tried = [(roughly(one), one) for one in lt.algorithms(len(x), weight)]
    for _, near in sorted(tried, key=itemgetter(0))[:2]:
        tried += [(roughly(one), one) for one in lt.neighbours(near, len(x), weight)]
    same = []
    for _, one in sorted(tried, key=itemgetter(0))[:_CANDIDATES]:
        if lt.multiply(x, weight, out, one) and torch.equal(out, expected):
            same.append(one)
    ways = [lambda: F.linear(x, weight), *(by(one) for one in same)]
    often = 1 + int(_ENOUGH / _milliseconds(ways[0], 2))
    rounds = [[_milliseconds(way, often) for way in ways] for _ in range(_ROUNDS)]
    found = best(list(zip(*rounds, strict=True)))
    return same[found - 1] if found else None


def _milliseconds(run: Callable[[], object], times: int) -> float:
    """Of one run, on the device."""
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


def _lies_well(*operands: Tensor) -> bool:
    return all(one.is_contiguous() and one.data_ptr() % ALIGNMENT == 0 for one in operands)
