"""docs/weights.md: memory of loads that round weights on a CPU."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, table

_GOAL = 1.1


@table("cpu-load-peak", "cpu-load-peak-98098cd.json", "cpu-load-peak.json")
def load_peak(before: Any, now: Any) -> Cells:
    """Each cell is the largest of all loads."""
    lines = [["format", "commit", "weights and pages, MiB", "anonymous peak, MiB", "over it",
              "resident peak, MiB", "after, MiB", "seconds", "goal"]]  # fmt: skip
    for name in ("int4", "int8"):
        for data in (before, now):
            loads = [one for one in data["loads"] if one["quantization"] == name]
            result = loads[0]["weights"] + loads[0]["pages"]
            peak, resident = (
                max(one["peak"][kind] for one in loads) for kind in ("anonymous", "resident")
            )
            after = max(one["after"]["anonymous"] for one in loads)
            seconds = sorted(one["seconds"] for one in loads)
            lines.append(
                [name, data["commit"][:7], *(f"{size / 2**20:.0f}" for size in (result, peak)),
                 f"{peak / result:.2f}", f"{resident / 2**20:.0f}", f"{after / 2**20:.0f}",
                 f"{seconds[0]:.1f} to {seconds[-1]:.1f}",
                 held(peak / result, _GOAL, shown=f"at most {_GOAL}")]
            )  # fmt: skip
    return lines
