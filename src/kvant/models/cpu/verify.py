"""Cells of `kvant verify` for weights on a CPU: products against float64 products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvant.models.cpu.info import GROUP
from kvant.models.cpu.linear import Linear
from kvant.models.cpu.rounding import EIGHT_BITS, EXACT
from kvant.models.cpu.weights import Code, pack, pack_narrow
from kvant.weights.codecs import decode, encode_in_parts
from kvant.weights.format import BLOCK_TYPES
from kvant.weights.verify import ROWS, SHAPE, ProductCell

_MOST = 1e-5
"""Maximum relative error of float32 sums."""

_MOST_ROUNDED = 4e-3
"""Maximum relative error of results that are rounded to bfloat16, which has 8 significant bits."""


def verify_cpu_products() -> Iterator[ProductCell]:
    """Multiplies by every kind of weights, in every way that an engine uses; yields the errors."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(SHAPE, generator=generator) * 0.02
    inputs = [torch.randn(rows, SHAPE[1], generator=generator) for rows in ROWS]
    for dtype in (torch.float32, torch.bfloat16):
        weight = pack(numbers.to(dtype), None)
        exact, name = weight.codes.to(torch.float64), str(dtype).removeprefix("torch.")
        product = Linear(weight, None)
        found = [_error(product(x), x.to(torch.float64) @ exact.T) for x in inputs]
        yield ProductCell(name, "exact activations", tuple(found), _MOST)
    coarse = [x.to(torch.bfloat16).to(torch.float32) for x in inputs]
    found = [_error(product(x, to_bf16=True), x.to(torch.float64) @ exact.T) for x in coarse]
    yield ProductCell(name, "bfloat16 activations and results", tuple(found), _MOST_ROUNDED)
    for code in Code:
        if code.is_number:
            continue
        narrow = encode_in_parts(numbers, code.format)
        exact, weight = decode(narrow, torch.float64), pack_narrow(narrow)
        name = f"GGUF {code.name}" if code.name in BLOCK_TYPES else code.format.summary
        for digits, way in ((EXACT, "exact activations"), (EIGHT_BITS, "int8 activations")):
            product, errors = Linear(weight, None, digits), []
            for x in inputs:
                seen = x.to(torch.float64) if digits == EXACT else rounded(x)
                errors.append(_error(product(x), seen @ exact.T))
            yield ProductCell(name, way, tuple(errors), _MOST)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.to(torch.float64) - expected).norm() / expected.norm())


def rounded(x: Tensor) -> Tensor:
    """Returns x [T, columns] float32 as `--weight-activations int8` rounds it, float64 [T, columns].

    The scale of a block of 32 is its largest magnitude over 127.
    """
    blocks = x.reshape(x.shape[0], -1, GROUP)
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = torch.round(blocks * (127.0 / largest))
    return (codes.to(torch.float64) * (largest / 127.0)).reshape(x.shape)
