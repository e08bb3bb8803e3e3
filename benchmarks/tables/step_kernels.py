"""docs/benchmarks/narrow.md: which kernels the steps of narrow weights spend their time in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.tables import Cells, percent, table

_PRODUCTS = "gate_up", "down", "qkv", "output"
_HEAD = "one_row", "product", "nvjet_sm90_tst", "decode_tile"
"""Kernels that multiply by a head of 16 bits, or of one that is decoded."""


@table("step-kernels", "h200-step-kernels.json")
def step_kernels(data: Any) -> Cells:
    lines = [["weights", "load", "us a step", *_PRODUCTS, "head", "attention", "the rest", "gaps"]]
    for row in data["rows"]:
        steps, shares = row["steps"], dict(_parts(row["steps"]))
        kind = "" if steps["kind"] == "decodes" else ", prompts too"
        head = row["head"] if row["head"] == "bfloat16" else f"head {row['head']}"
        label = row["weights"] if row["head"] == "bfloat16" else f"{row['weights']}, {head}"
        cells = [f"{shares[name][0]:,.0f}{shares[name][1]}" for name in (*_PRODUCTS, "head")]
        attention = shares["attention"][0]
        rest = steps["us"] - steps["gap_us"] - sum(value for value, _ in shares.values())
        lines.append(
            [label, row["load"] + kind, f"{steps['us']:,.0f}", *cells, f"{attention:,.0f}",
             f"{rest:,.0f}", f"{steps['gap_us']:,.0f}"]
        )  # fmt: skip
    return lines


def _parts(steps: Any) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yields microseconds of each part of a step, and its share of the read bandwidth in words."""
    decodes = steps["kind"] == "decodes"
    for product in (*_PRODUCTS, "head"):
        found = [one for one in steps["kernels"] if one["product"] == product]
        if product == "head" and not found:
            found = [one for one in steps["kernels"] if one["name"].startswith(_HEAD)]
        share = next(
            (one["of_bandwidth"] for one in found if one["of_bandwidth"] is not None), None
        )
        words = f" ({percent(share)})" if decodes and share is not None else ""
        yield product, (sum(one["own_us"] for one in found), words)
    found = [
        one
        for one in steps["kernels"]
        if one["name"].startswith(("paged_attention", "combine", "cudnn", "rotate_and_store"))
    ]
    yield "attention", (sum(one["own_us"] for one in found), "")
