"""docs/benchmarks/scheduler.md: a step without its model."""

from __future__ import annotations

from typing import Any

from tables import Cells, table

FILE = "scheduler.json"
PARTS = ("schedule_us", "build_us", "advance_us", "total_us", "p99_us")


@table("scheduler", FILE)
def scheduler(data: Any) -> Cells:
    lines = [
        ["load", "sequences", "tokens a step", "schedule", "build", "advance", "step", "p99",
         "us a sequence"]
    ]  # fmt: skip
    for r in data["rows"]:
        parts = [f"{r[part] / 1e3:.3f}" for part in PARTS]
        each = r["total_us"] / r["sequences"]
        lines.append([r["load"], str(r["sequences"]), f"{r['tokens']:.0f}", *parts, f"{each:.2f}"])
    return lines


@table("scheduler-whole", FILE)
def whole(data: Any) -> Cells:
    lines = [["sequences", "step", "p99", "us a sequence"]]
    for r in data["whole"]:
        times = [f"{r[part] / 1e3:.3f}" for part in ("median_us", "p99_us")]
        lines.append([str(r["sequences"]), *times, f"{r['median_us'] / r['sequences']:.2f}"])
    return lines
