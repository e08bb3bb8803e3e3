"""Cells of `kvant verify` for narrow weights on a CPU: products against float64 products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvant.models.cpu.info import GROUP
from kvant.models.cpu.linear import Linear
from kvant.models.cpu.rounding import EIGHT_BITS, EXACT
from kvant.models.cpu.weights import Code, pack, unpack
from kvant.weights.verify import ROWS, SHAPE, ProductCell

_MOST = 1e-5
"""Maximum relative error of float32 sums."""


def verify_cpu_products() -> Iterator[ProductCell]:
    """Multiplies by every format, with exact and with rounded activations; yields the errors."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(SHAPE, generator=generator) * 0.02
    inputs = [torch.randn(rows, SHAPE[1], generator=generator) for rows in ROWS]
    for code in Code:
        if code.is_number:
            continue
        weight = pack(numbers, code)
        exact = unpack(weight).to(torch.float64)
        for digits, way in ((EXACT, "exact activations"), (EIGHT_BITS, "int8 activations")):
            product, errors = Linear(weight, None, digits), []
            for x in inputs:
                seen = x.to(torch.float64) if digits == EXACT else rounded(x)
                expected = seen @ exact.T
                found = product(x).to(torch.float64)
                errors.append(float((found - expected).norm() / expected.norm()))
            yield ProductCell(code.format, way, tuple(errors), _MOST)


def rounded(x: Tensor) -> Tensor:
    """Returns x [T, columns] float32 as `--weight-activations int8` rounds it, float64 [T, columns].

    The scale of a block of 32 is its largest magnitude over 127.
    """
    blocks = x.reshape(x.shape[0], -1, GROUP)
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = torch.round(blocks * (127.0 / largest))
    return (codes.to(torch.float64) * (largest / 127.0)).reshape(x.shape)
