"""`few_rows.cu` over listed experts in mxfp4 on one GPU: times of its cuts and of bounds on registers.

    python -m benchmarks.expert_decode [--tokens 32] [--out FILE]

Experts are those of gpt-oss-20b, random, with random choices; two copies of the weights take turns, so that
no cache holds them. Results must have the bits of the first cut with as many warps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch

from kvant.kernels.cuda import build
from kvant.measure.gpu_time import time_us
from kvant.weights.codecs import NarrowWeight
from kvant.weights.cuda import few_rows
from kvant.weights.cuda.few_rows import Act, Beside, Kind, Pairs, Warps
from kvant.weights.format import MXFP4

EXPERTS, TOP_K, WIDTH = 32, 4, 2880
_PACKAGE = few_rows.__package__
CUTS = Warps(2, 2, 2), Warps(2, 2, 3), Warps(2, 4, 2), Warps(4, 2, 2)
RESIDENT = 0, 16, 20, 24
"""Warps that must find room in a multiprocessor's registers; 0 for any number."""


@dataclass(frozen=True, slots=True)
class Product:
    """One of the two products. weights: copies that take turns. x: [rows, WIDTH]. bias: [experts, rows]."""

    kind: Kind
    weights: tuple[NarrowWeight, ...]
    x: torch.Tensor
    bias: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for row in measure(asked.tokens):
        print(row, flush=True)
        rows.append(row)
    if asked.out is not None:
        found = {"device": torch.cuda.get_device_name(), "tokens": asked.tokens, "rows": rows}
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(tokens: int) -> Iterator[dict[str, object]]:
    """Yields a row for every product, cut and bound on registers."""
    beside, made = choices(tokens), products(tokens)
    jobs = []
    for (label, one), cut, resident in product(made.items(), CUTS, RESIDENT):
        calls = [
            few_rows.arranged(one.x, weight, one.bias, cut, one.kind, beside, experts=EXPERTS)
            for weight in one.weights
        ]
        macros = few_rows.defines(
            MXFP4, WIDTH, calls[0].tiles, torch.bfloat16, cut, one.kind, bias=True
        )
        macros["RESIDENT"] = resident // cut.warps
        build.begin(_PACKAGE, few_rows.SOURCES, macros)
        jobs.append((label, cut, resident, macros, calls))
    first: dict[tuple[str, int], torch.Tensor] = {}
    for label, cut, resident, macros, calls in jobs:
        size = few_rows.shared_bytes(macros)
        kernel = build.build(
            _PACKAGE, few_rows.SOURCES, "few_rows", macros, size, few_rows.ARGUMENTS
        )
        us = median(time_us(partial(_launch, kernel, calls, 32 * cut.warps), repeats=7))
        expected = first.setdefault((label, cut.warps), calls[0].out)
        yield {
            "product": label, "cut": [cut.tiles, cut.warps, cut.ahead], "resident warps": resident,
            "us": us / len(calls), "same bits": torch.equal(expected, calls[0].out),
        }  # fmt: skip


def _launch(kernel: build.Kernel, calls: Sequence[few_rows.Call], threads: int) -> None:
    for call in calls:
        kernel.launch(call.programs, threads, call.values, ahead=True)


def choices(tokens: int) -> Beside:
    """Returns random choices of experts for some tokens, as the router and `list_pairs` write them."""
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, -1).indices.to(torch.int32)
    lists = ids.new_zeros(EXPERTS, tokens)
    counts = ids.new_zeros(EXPERTS)
    for expert in range(EXPERTS):
        pairs = (ids.flatten() == expert).nonzero().flatten()
        counts[expert] = len(pairs)
        lists[expert, : len(pairs)] = pairs
    shares = torch.rand(tokens, TOP_K, device="cuda")
    return Beside(
        ids=ids, shares=shares, lists=lists, counts=counts, limit=7.0, alpha=1.702, top_k=TOP_K
    )


def products(tokens: int) -> dict[str, Product]:
    """Returns gate and up, and down, with random weights on the GPU."""
    up = Kind(gated=True, alternating=True, act=Act.CLAMPED, pairs=Pairs.LISTED)
    down = Kind(pairs=Pairs.LISTED, share=True)
    found = {}
    for label, kind, rows, inputs in (
        ("gate_up", up, 2 * WIDTH, tokens),
        ("down", down, WIDTH, tokens * TOP_K),
    ):
        x = torch.randn(inputs, WIDTH, device="cuda").to(torch.bfloat16)
        bias = torch.randn(EXPERTS, rows, device="cuda").to(torch.bfloat16)
        found[label] = Product(kind, (_random(rows), _random(rows)), x, bias)
    return found


def _random(rows: int) -> NarrowWeight:
    whole = EXPERTS * rows
    codes = torch.randint(0, 256, (whole, WIDTH // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(118, 122, (WIDTH // 32, whole), dtype=torch.uint8, device="cuda")
    return NarrowWeight(MXFP4, whole, WIDTH, codes, scales)


if __name__ == "__main__":
    main()
