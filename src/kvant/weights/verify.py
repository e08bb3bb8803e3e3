"""Cells of `kvant verify` for narrow weights: products against float64 products of the decoded bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvant.weights.codecs import NarrowWeight, decode, encode
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    NVFP4,
    Q4_1,
    Q4_K,
    Q6_K,
    Code,
    WeightFormat,
    int4_groups,
    int8_groups,
)
from kvant.weights.linear import MOST_EXACT, multiply, rounded_numbers, rounding_of

FORMATS = (
    FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, INT8_CHANNEL, int8_groups(32), int8_groups(128),
    int4_groups(32), int4_groups(64), int4_groups(128), int4_groups(128, zero_points=True),
    MXFP4, NVFP4, Q4_1, Q4_K, Q6_K,
)  # fmt: skip
ROWS = (1, 9, 64, 200, 512)
"""Numbers of rows of activations: one for each kind of kernel."""

SHAPE = (1040, 1280)
"""Outputs and inputs; the last stripe of outputs is not full."""

MOST = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""Maximum relative error of a correct product, by the dtype of results and of decoded numbers."""


@dataclass(frozen=True, slots=True)
class ProductCell:
    """Results of one kind of weights.

    name: of their format. errors: for each of `ROWS`, norm of the error over norm of the product. most: their
    limit. kernels: what multiplied each of `ROWS`; () for a CPU, which has one kernel.
    """

    name: str
    way: str
    errors: tuple[float, ...]
    most: float
    kernels: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return all(error < self.most for error in self.errors)


def _ways(fmt: WeightFormat, like: torch.Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields kinds of products: a name, and keyword arguments of `multiply`."""
    yield "fastest", {}
    yield "batch-invariant", {"alike": True}
    if fmt.code is Code.E4M3:
        yield "rounded activations", {"rounds": True}
        if fmt != FP8_BLOCK:
            yield "rounded activations, fast sums", {"rounds": True, "fast_sums": True}
            scale = like.new_full((1,), 1 / 64)
            yield "activations by a stored scale", {"rounds": True, "input_scale": scale}


def verify_products(device: torch.device, dtype: torch.dtype) -> Iterator[ProductCell]:
    """Multiplies by weights of every format in every way that an engine uses; yields the errors."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(SHAPE, device=device, generator=generator) * 0.02
    inputs = [
        torch.randn(rows, SHAPE[1], device=device, generator=generator).to(dtype) for rows in ROWS
    ]
    for fmt in FORMATS:
        weight = encode(numbers, fmt)
        exact = decode(weight, torch.float64)
        for way, options in _ways(fmt, numbers):
            rounds, input_scale = options.get("rounds", False), options.get("input_scale")
            errors = []
            for x in inputs:
                seen = x.to(torch.float64)
                if rounds and len(x) > MOST_EXACT:
                    seen = rounded_numbers(x, fmt, input_scale).to(torch.float64)
                expected = seen @ exact.T
                found = multiply(x, weight, None, **options).to(torch.float64)
                errors.append(float((found - expected).norm() / expected.norm()))
            kernels = _kernels(weight, dtype, alike="alike" in options, rounds=rounds)
            yield ProductCell(fmt.summary, way, tuple(errors), MOST[dtype], kernels)


def _kernels(
    weight: NarrowWeight, dtype: torch.dtype, *, alike: bool, rounds: bool
) -> tuple[str, ...]:
    """Returns what multiplies each of `ROWS` by a weight, as `multiply` chooses it."""
    if weight.device.type != "cuda":
        return ()
    from kvant.weights.choose import Kernel, kernel_for

    if alike:
        return tuple(Kernel.TILES.value for _ in ROWS)
    return tuple(
        "fp8 times fp8"
        if rounds and rounding_of(weight, rows) is not None
        else kernel_for(weight.format, rows, *weight.shape, dtype).value
        for rows in ROWS
    )
