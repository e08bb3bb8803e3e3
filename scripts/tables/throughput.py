"""docs/benchmarks/throughput.md and the GPU part of invariance.md: the engine on an H200."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tables import Cells, percent, table

LOADS = ("1x128/256", "32x128/256", "512x1024/256", "64x16384/128")
FORMATS = ("bfloat16", "fp8_e4m3", "fp8_per_token_head", "int4_per_token_head")


def output_tokens_per_second(load: str, seconds: Iterable[float]) -> float:
    """Of the fastest repeat: whatever disturbs only slows."""
    requests, _, output = map(int, re.split("[x/]", load))
    return requests * output / min(seconds)


def _rounds(*files: Any) -> dict[tuple[str, str], Any]:
    """By load and stored format; a later file's round stands for an earlier one's."""
    return {(r["load"], r["stored"]): r for data in files for r in data["rounds"]}


@table(
    "h200-throughput",
    "h200-throughput.json",
    "h200-throughput-narrow.json",
    "h200-throughput-strides.json",
    "vllm-h200.json",
)
def throughput(wide: Any, narrow: Any, strides: Any, vllm: Any) -> Cells:
    found, peer = _rounds(wide, narrow, strides), vllm["loads"]
    lines = [
        [
            "requests x input/output",
            "unit",
            "vLLM bfloat16",
            "vLLM fp8",
            *(f"Kvant {f}" for f in FORMATS),
        ]
    ]
    for load in LOADS:
        in_seconds = load in vllm["in_seconds"]
        cells = [f"{peer[load][f]:g}" for f in ("bfloat16", "fp8")]
        for stored in FORMATS:
            r = found.get((load, stored))
            if r is None:
                cells.append("not run")
            elif in_seconds:
                cells.append(f"{min(r['seconds']):.1f}")
            else:
                cells.append(f"{output_tokens_per_second(load, r['seconds']):.0f}")
        lines.append([load.replace("x", " x "), "seconds" if in_seconds else "out tok/s", *cells])
    held = [next(r for (_, f), r in found.items() if f == stored) for stored in FORMATS]
    for what, unit, key, shown in (
        ("the pool holds", "tokens", "capacity_tokens", ",d"),
        ("until ready", "seconds", "start_seconds", ".1f"),
    ):
        theirs = vllm["ready_seconds" if key == "start_seconds" else key]
        cells = [format(theirs[f], shown) for f in ("bfloat16", "fp8")]
        lines.append([what, unit, *cells, *(format(r[key], shown) for r in held)])
    return lines


@table("h200-invariance", "h200-invariance.json", "h200-throughput.json")
def invariance(on: Any, off: Any) -> Cells:
    plain = _rounds(off)
    lines = [["load", "KV format", "off, out tok/s", "on", "difference"]]
    for (load, stored), r in sorted(_rounds(on).items()):
        rates = [
            output_tokens_per_second(load, rounds["seconds"]) for rounds in (plain[load, stored], r)
        ]
        lines.append(
            [load.replace("x", " x "), stored, *(f"{rate:.0f}" for rate in rates),
             percent(rates[1] / rates[0] - 1, sign=True)]
        )  # fmt: skip
    return lines
