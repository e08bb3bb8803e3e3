"""docs/offload.md: what tiers save."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tables import Cells, table


@table("h200-agent-trace", "h200-agent-trace.json")
@table("agent-trace", "cpu-agent-trace.json")
def agents(run: Any) -> Cells:
    lines = [["host tier", "tokens of all turns", "computed", "computed again", "restored"]]
    for row in run["rows"]:
        lines.append(
            ["yes" if row["host_tier"] else "no", f"{row['prompt_tokens']:,}", f"{row['computed']:,}",
             f"{row['again']:,}", f"{row['restored']:,}"]
        )  # fmt: skip
    return lines


@table("cpu-break-even", "cpu-break-even.json")
def break_even(run: Any) -> Cells:
    lines = [
        [
            "tokens",
            "format",
            "bytes a token",
            "computed, s",
            "restored, s",
            "restored over computed",
        ]
    ]
    for row in run["rows"]:
        (name,) = row["formats"]
        seconds = (statistics.median(row[f"{how}_seconds"]) for how in ("computed", "restored"))
        lines.append(
            [f"{row['context']:,}", name, f"{row['bytes_per_token']:,}",
             *(f"{one:.3f}" for one in seconds), f"{row['ratio']:.2f}"]
        )  # fmt: skip
    return lines


@table("h200-restore", "h200-offload-restore.json")
def restores(run: Any) -> Cells:
    gaps = run["gaps"]
    cold, warm = (
        " / ".join(f"{seconds:.2f}" for seconds in run[name])
        for name in ("computed_seconds", "restored_seconds")
    )
    rate = run["restore_bytes_per_second"], run["bus_bytes_per_second"]
    return [
        ["what", "measured"],
        ["first token, computed, s", cold],
        ["first token, restored, s", warm],
        ["restored over computed (medians)", f"{run['ratio']:.2f}"],
        ["copies of a restore while they run, GB/s", f"{rate[0] / 1e9:.1f}"],
        ["2,048 pages from the first copy's begin to the last one's end, GB/s",
         f"{run['pages']['alone_bytes_per_second'] / 1e9:.1f}"],
        ["the same beside steps, GB/s",
         f"{run['pages']['beside_steps_bytes_per_second'] / 1e9:.1f}"],
        ["large copies over the bus, GB/s", f"{rate[1] / 1e9:.1f}"],
        ["p99 of a step of running answers, ms", f"{gaps['without']['p99'] * 1e3:.1f}"],
        ["the same beside restores, ms", f"{gaps['beside_restores']['p99'] * 1e3:.1f}"],
        ["the one over the other", f"{gaps['p99_ratio']:.2f}"],
        ["slowest step of a restore, and of a request whose pages are still there, ms (medians)",
         " / ".join(f"{statistics.median(gaps['slowest_of_each'][name]) * 1e3:.1f}"
                    for name in ("restored", "on_device"))],
        ["p50 without and beside, ms",
         f"{gaps['without']['p50'] * 1e3:.1f} / {gaps['beside_restores']['p50'] * 1e3:.1f}"],
    ]  # fmt: skip
