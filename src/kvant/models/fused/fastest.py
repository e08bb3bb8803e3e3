"""Which of a library's algorithms multiplies long prompts fastest, found by running them.

torch lets cuBLAS choose by rules. On an H200 another algorithm takes up to 8 % less time for full steps of
a prompt, and with other numbers of rows another one; docs/benchmarks/throughput.md has the times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvant.models.fused.cublas_lt import Algorithm, CublasLt

_ROWS = (2048, 4096, 6144, 8192)
"""Tokens of steps that are measured; prompts are cut where pieces of 1024 end."""
_LEAST, _MOST = 0.94, 1.12
"""Of the rows that were measured: those that are multiplied alike. Answers ride along with a full step.
Farther away rows fill other tiles, and what is best here may be a tenth slower there."""
_WORTH = 0.99
_CANDIDATES, _ROUNDS = 6, 5
_MILLISECONDS = 1.0  # of one reading, at least


def measured_rows(most: int) -> list[int]:
    """Where steps have up to `most` tokens; empty where those are too few to be worth it."""
    found = [rows for rows in _ROWS if rows <= most]
    return found if not found or measured_for(most, found) else [*found, most]


def measured_for(rows: int, measured: Collection[int]) -> int | None:
    """The measured number of rows whose algorithm is used for so many; None: that of torch."""
    near = [one for one in measured if _LEAST * one <= rows <= _MOST * one]
    return min(near, key=lambda one: abs(one - rows), default=None)


def fastest(lt: CublasLt, x: Tensor, weight: Tensor) -> Algorithm | None:
    """The algorithm for x @ weight.T that takes less time than torch's and gives the same bits.

    None where there is none that is faster by a hundredth. The device must be idle.
    """
    expected = F.linear(x, weight)
    out = torch.empty_like(expected)

    def by(algorithm: Algorithm) -> Callable[[], object]:
        return lambda: lt.multiply(x, weight, out, algorithm)

    def roughly(algorithm: Algorithm) -> float:
        runs = lt.multiply(x, weight, out, algorithm)  # and is loaded
        return _milliseconds(by(algorithm), 2) if runs else math.inf

    tried = [(roughly(one), one) for one in lt.algorithms(len(x), weight)]
    for _, near in sorted(tried, key=itemgetter(0))[:2]:
        tried += [(roughly(one), one) for one in lt.neighbours(near, len(x), weight)]
    same = []
    for _, one in sorted(tried, key=itemgetter(0))[:_CANDIDATES]:
        if lt.multiply(x, weight, out, one) and torch.equal(out, expected):
            same.append(one)
    ways = [lambda: F.linear(x, weight), *(by(one) for one in same)]
    often = 1 + int(_MILLISECONDS / _milliseconds(ways[0], 2))
    rounds = [[_milliseconds(way, often) for way in ways] for _ in range(_ROUNDS)]
    found = least(list(zip(*rounds, strict=True)))
    return same[found - 1] if found else None


def least(times: Sequence[Sequence[float]]) -> int:
    """Whose median is least; the first, where no other is less by a hundredth."""
    medians = [median(one) for one in times]
    found = min(range(len(times)), key=medians.__getitem__)
    return found if medians[found] < _WORTH * medians[0] else 0


def _milliseconds(run: Callable[[], object], times: int) -> float:
    """Of one run, by the device's clock."""
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times
