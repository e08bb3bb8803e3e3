"""docs/benchmarks/flashinfer.md: FlashInfer compared with Triton, on the same pages."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tables import Cells, table

FILE = "h200-flashinfer.json"


def _cells(data: Any, prompts: bool) -> Cells:
    lines = [["case", "triton us", "flashinfer us", "flashinfer over triton", "its plan, us"]]
    for row in data["rows"]:
        if row["case"].startswith("prefill") == prompts:
            mine, theirs = (statistics.median(row[f"{k}_us"]) for k in ("triton", "flashinfer"))
            digits = 0 if mine > 100 else 1
            lines.append(
                [row["case"], f"{mine:.{digits}f}", f"{theirs:.{digits}f}", f"{theirs / mine:.2f}",
                 f"{row['plan_us']:.0f}"]
            )  # fmt: skip
    return lines


@table("flashinfer-few-queries", FILE)
def few_queries(data: Any) -> Cells:
    return _cells(data, prompts=False)


@table("flashinfer-prompts", FILE)
def prompts(data: Any) -> Cells:
    return _cells(data, prompts=True)
