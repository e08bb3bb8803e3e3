"""docs/benchmarks/step.md and moe.md: the rebuilt step and the previous one, and layers of experts."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, percent, table
from benchmarks.tables.throughput import output_tokens_per_second, rounds

LOADS = tuple(
    f"h200-step-{when}-{what}.json" for what in ("bfloat16", "fp8") for when in ("before", "after")
)
IDLE = tuple(f"h200-step-{when}-idle.json" for when in ("before", "after"))
REPLAY = tuple(f"h200-step-{when}-replay.json" for when in ("before", "after"))
MOE = ("h200-moe-qwen3-30b.json", "h200-moe-qwen3-30b-256.json")


@table("step-loads", *LOADS)
def loads(*files: Any) -> Cells:
    lines = [
        ["requests x input/output", "KV cache", "before, tok/s", "after, tok/s", "after / before"]
    ]
    for before, after in zip(files[::2], files[1::2], strict=True):
        old, new = rounds(before), rounds(after)
        for (load, stored), one in old.items():
            rates = [output_tokens_per_second(load, r["seconds"]) for r in (one, new[load, stored])]
            lines.append(
                [load, stored, *(f"{rate:.0f}" for rate in rates), f"{rates[1] / rates[0]:.3f}"]
            )
    return lines


@table("step-idle", *IDLE)
def idle(*files: Any) -> Cells:
    lines = [["step", "KV cache", "sequences", "device idle", "ms a step, busy", "ms a step"]]
    for when, data in zip(("before", "after"), files, strict=True):
        for r in data["rows"]:
            found = r["timing"]["idle"]
            lines.append(
                [when, r["stored"], str(r["timing"]["case"]["batch"]),
                 percent(found["share"], digits=2), f"{found['busy_ms']:.2f}", f"{r['median_ms']:.2f}"]
            )  # fmt: skip
    return lines


@table("step-drafts", *REPLAY)
def drafts(*files: Any) -> Cells:
    lines = [
        ["step", "requests", "drafts", "tok/s, best of two", "tokens a step", "steps a second"]
    ]
    for when, data in zip(("before", "after"), files, strict=True):
        for r in data["rows"]:
            best = min(r["repeats"], key=lambda one: one["seconds"] / one["new"])
            lines.append(
                [when, str(r["requests"]), str(r["num_drafts"] or "-"),
                 f"{best['new'] / best['seconds']:.0f}",
                 f"{best['new'] / best['steps'] / r['requests']:.2f}",
                 f"{best['steps'] / best['seconds']:.1f}"]
            )  # fmt: skip
    return lines


@table("moe-loads", *MOE)
def moe(*files: Any) -> Cells:
    lines = [["requests x input/output", "tok/s"]]
    for (load, _), r in rounds(*files).items():
        lines.append([load, f"{output_tokens_per_second(load, r['seconds']):.0f}"])
    return lines
