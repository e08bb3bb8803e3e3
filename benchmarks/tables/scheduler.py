"""docs/benchmarks/scheduler.md: a step without its model."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, percent, table

FILE = "scheduler.json"
IDLE_FILES = ("h200-idle-256.json", "h200-idle-1024.json")
MOST_IDLE = 0.02
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


@table("scheduler-idle", *IDLE_FILES)
def idle(*files: Any) -> Cells:
    lines = [
        ["sequences", "KV cache", "device idle", "goal", "of all, in gaps from 10 us",
         "longest gap, us", "ms a step, busy", "profiled", "median without the profiler"]
    ]  # fmt: skip
    for data in files:
        for r in data["rows"]:
            found, median = r["timing"]["idle"], r["median_ms"]
            lines.append(
                [str(r["timing"]["case"]["batch"]), r["stored"], percent(found["share"], digits=2),
                 held(100 * found["share"], 100 * MOST_IDLE, shown=percent(MOST_IDLE)),
                 percent(found["long_share"], digits=2), f"{found['longest_gap_us']:.0f}",
                 f"{found['busy_ms']:.2f}", f"{found['wall_ms']:.2f}", f"{median:.2f}"]
            )  # fmt: skip
    return lines
