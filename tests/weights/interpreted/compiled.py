"""Run as a program without `TRITON_INTERPRET`, with a compute capability (80, 90 or 100) as its argument.

Compiles products with narrow weights in both 16-bit dtypes, on a machine without a GPU, and prints kernels.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvant.weights import choose
from kvant.weights.codecs import encode
from kvant.weights.format import FP8_BLOCK, INT8_CHANNEL, NVFP4, Q4_1, Q4_K, Q6_K, int4_groups
from kvant.weights.rounding import Rounding
from kvant.weights.triton import product
from kvant.weights.triton.product import Stripe, Tiles
from tests.engine.interpreted.compiled import type_of

MOST_SHARED = {80: 166912, 90: 232448, 100: 232448}
"""Bytes of shared memory that a program may have, by compute capability."""

TARGET = int(sys.argv[1]) if len(sys.argv) > 1 else 90
HAS_FP8 = TARGET >= 89


def _compile(kernel: JITFunction[Any], *given: object, **options: Any) -> None:
    """In the place of a launch."""
    names = [parameter.name for parameter in kernel.params]
    arguments = dict(zip(names, given, strict=False))
    arguments |= {name: options.pop(name) for name in names if name in options}
    constant = {p.name for p in kernel.params if p.is_constexpr}
    constant |= {name for name, value in arguments.items() if value is None}
    types = {n: "constexpr" if n in constant else type_of(arguments[n]) for n in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[name].startswith("*") or name in {"N", "COLUMNS"}
    }
    source = ASTSource(kernel, types, {name: arguments[name] for name in constant}, aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", TARGET, 32), options={"num_warps": options["num_warps"]}
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= MOST_SHARED[TARGET], (kernel.fn.__name__, made.metadata.shared)
    print(kernel.fn.__name__, made.metadata.shared, flush=True)


def main() -> None:
    formats = (
        FP8_BLOCK, INT8_CHANNEL, int4_groups(128, zero_points=True), int4_groups(32), NVFP4,
        Q4_1, Q4_K, Q6_K,
    )  # fmt: skip
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.empty(16, 4096, dtype=dtype)
        for fmt in formats:
            weight = encode(torch.randn(128, 4096), fmt)
            product.tiled(x, weight, None, Tiles(16, 64, 128, 4, 4, 4))
            product.one(x[:1], weight, None, Stripe(2, 1024, 4))
            product.decoded(weight, torch.empty(weight.shape, dtype=dtype))
            if fmt in (Q4_1, Q4_K, Q6_K):
                product.tiled(x, weight, x[0, :128], Tiles(128, 128, 128, 1, 3, 8))
                product.rows_decoded(weight, torch.zeros(3, dtype=torch.int64), dtype)
    weight = encode(torch.randn(128, 4096), FP8_BLOCK)
    for tokens in (64, 512) if HAS_FP8 else ():
        wide = torch.empty(tokens, 4096, dtype=torch.bfloat16)
        for rounding in (Rounding(), Rounding(group=128), Rounding(scale=torch.ones(1))):
            made = choose.round_activations(wide, rounding)
            if rounding.group:
                out = torch.empty(tokens, 128, dtype=torch.bfloat16)
                product.of_blocks(made.codes, made.scales, weight, out)
    weight = encode(torch.randn(128, 4096), INT8_CHANNEL)
    product.tiled(x, weight, x[0, :128], Tiles(128, 128, 128, 1, 3, 8))


if __name__ == "__main__":
    JITFunction.run = _compile  # type: ignore[method-assign,assignment]
    product.has_ptx = lambda device: HAS_FP8  # type: ignore[attr-defined]
    main()
