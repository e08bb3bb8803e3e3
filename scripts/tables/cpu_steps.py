"""Whole steps on a CPU beside peers: README, docs/benchmarks/cpu.md."""

from __future__ import annotations

import statistics
from typing import Any

from tables import Cells, table


def median_ms(row: Any) -> float:
    return statistics.median(ms for found in row["rounds"] for ms in found)


def tokens_per_second(row: Any) -> float:
    return 1000 * row["tokens"] / median_ms(row)


@table("demo-speed", "demo.json")
def demo(data: Any) -> Cells:
    cases = list(dict.fromkeys(r["case"] for r in data["speed"]))
    found = {(r["engine"], r["case"]): f"{tokens_per_second(r):.1f}" for r in data["speed"]}
    lines = [["float32 weights and KV, tokens/s", *cases]]
    for engine in dict.fromkeys(engine for engine, _ in found):
        lines.append([engine, *(found[engine, case] for case in cases)])
    return lines
