"""docs/benchmarks/invariance.md, on a CPU: flips, and what the batch-invariant mode costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.tables import Cells, percent, table

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


@table("h200-answers", "h200-answers.json")
def answers(data: Any) -> Cells:
    found = {
        (r["format"], r["batch_invariant"], r["way"], r["beside"]): r for r in data["agreements"]
    }
    lines = [
        ["KV format", "in a batch: flips, off", "of", "share", "without graphs: flips, off", "of",
         "in a batch: flips, on", "of", "without graphs: flips, on", "of"]
    ]  # fmt: skip
    for name in dict.fromkeys(r["format"] for r in data["agreements"]):
        batch = found[name, False, "batch", "alone"]
        graphs = found[name, False, "unrecorded", "batch"]
        on = found[name, True, "batch", "alone"], found[name, True, "unrecorded", "batch"]
        lines.append(
            [name, str(batch["flips"]), f"{batch['positions']:,}",
             percent(batch["flips"] / batch["positions"], digits=1),
             *(cell for r in (graphs, *on) for cell in (str(r["flips"]), f"{r['positions']:,}"))]
        )  # fmt: skip
    return lines


@table("h200-cpu-answers", "h200-cpu-answers.json")
def devices(data: Any) -> Cells:
    """Compares answers on a CPU and on a GPU, and each with float32 throughout."""
    found = {(r["format"], r["dtype"]): r for r in data["agreements"]}
    far = {(r["device"], r["format"], r["dtype"]): r for r in data["beside_float32"]}
    lines = [
        ["compute", "KV format", "flips", "of", "share", "CPU beside float32", "GPU beside float32"]
    ]
    for name, dtype in sorted(found, key=lambda key: key[1], reverse=True):
        r = found[name, dtype]
        beside = [far[device, name, dtype] for device in ("cpu", "cuda")]
        lines.append(
            [dtype, name, str(r["flips"]), f"{r['positions']:,}",
             *(percent(one["flips"] / one["positions"], digits=1) for one in (r, *beside))]
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
