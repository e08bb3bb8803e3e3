"""docs/benchmarks/invariance.md, on a CPU: flips, and what the batch-invariant mode costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tables import Cells, percent, table

FILES = ("invariance.json", "invariance-more.json")


@table("invariance-compiled", "invariance-compiled.json")
def compiled(run: Any) -> Cells:
    return _flips([run])


@table("invariance-flips", *FILES)
def flips(runs: Any, more: Any) -> Cells:
    return _flips([*runs, more])


def _flips(runs: Sequence[Any]) -> Cells:
    lines = [
        ["KV format", "backend", "positions", "flips, mode off", "share", "largest change of a logit, off",
         "flips, mode on", "largest change, on"]
    ]  # fmt: skip
    for run in runs:
        found = {(r["format"], r["batch_invariant"]): r for r in run["flips"]}
        for (name, mode), on in found.items():
            if not mode:
                continue
            off = found[name, False]
            lines.append(
                [name, on["backend"], str(on["positions"]), str(off["flips"]),
                 percent(off["flips"] / off["positions"], digits=1), f"{off['most']:.2g}", str(on["flips"]),
                 f"{on['most']:.2g}"]
            )  # fmt: skip
    return lines


@table("invariance-cost", FILES[0])
def cost(runs: Any) -> Cells:
    lines = [
        [
            "KV format",
            "backend",
            "batch 1, off",
            "on",
            "difference",
            "batch 8, off",
            "on",
            "difference",
        ]
    ]
    for run in runs:
        found = {(r["format"], r["batch"], r["batch_invariant"]): r for r in run["decode"]}
        for name in dict.fromkeys(name for name, _, _ in found):
            cells = [name, found[name, 1, False]["backend"]]
            for batch in (1, 8):
                off, on = (found[name, batch, mode]["tokens_per_second"] for mode in (False, True))
                cells += [f"{off:.1f}", f"{on:.1f}", percent(on / off - 1, sign=True)]
            lines.append(cells)
    return lines
