"""docs/benchmarks/throughput.md and the GPU part of invariance.md: the engine on an H200."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tables import Cells, held, percent, table

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


STEADY_GOALS = {"fp8_e4m3": 1.5, "fp8_per_token_head": 1.5, "int4_per_token_head": 2.0}
"""Times bfloat16."""
MIXED_GOAL = 1.03


@table("h200-steady-decode", "h200-decode.json")
def steady_decode(data: Any) -> Cells:
    lines = [
        ["KV cache", "bytes a token", "ms a step", "fastest and slowest", "times as fast", "goal"]
    ]
    uniform = _uniform(data)
    for r in data["rows"]:
        if ";" in r["stored"]:
            continue
        times, speed = r["timing"]["milliseconds"], uniform["bfloat16"] / r["median_ms"]
        goal = STEADY_GOALS.get(r["stored"])
        lines.append(
            [r["stored"], f"{r['bytes_per_token']:,}", f"{r['median_ms']:.2f}",
             f"{min(times):.2f}, {max(times):.2f}", f"{speed:.2f}x",
             "" if goal is None else held(speed, goal, least=True)]
        )  # fmt: skip
    return lines


@table("h200-mixed-decode", "h200-decode.json")
def mixed_decode(data: Any) -> Cells:
    """Each layer is expected to take its share of a step in which all layers are like it."""
    uniform = _uniform(data)
    size = {r["stored"]: r["bytes_per_token"] for r in data["rows"]}
    lines = [["KV cache", "layers in bfloat16", "ms a step", "sum over layers", "of that", "goal"]]
    for r in data["rows"]:
        if ";" not in r["stored"]:
            continue
        other = r["stored"].split(";")[0]
        share = (r["bytes_per_token"] - size[other]) / (size["bfloat16"] - size[other])
        expected = share * uniform["bfloat16"] + (1 - share) * uniform[other]
        ratio = r["median_ms"] / expected
        lines.append(
            [other, percent(share), f"{r['median_ms']:.2f}", f"{expected:.2f}", f"{ratio:.3f}x",
             held(ratio, MIXED_GOAL)]
        )  # fmt: skip
    return lines


def _uniform(data: Any) -> dict[str, float]:
    return {r["stored"]: r["median_ms"] for r in data["rows"] if ";" not in r["stored"]}
