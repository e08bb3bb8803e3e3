"""docs/benchmarks/throughput.md and the GPU part of invariance.md: the engine on an H200."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.tables import Cells, held, percent, table

LONG = ("64x16384/128",)
"""Loads that are reported in seconds."""
GOALS: dict[tuple[str, str], float] = {
    ("1x128/256", "bfloat16"): 210,
    ("32x128/256", "bfloat16"): 5800,
    ("512x1024/256", "bfloat16"): 6300,
    ("512x1024/256", "fp8_e4m3"): 7200,
    ("64x16384/128", "bfloat16"): 37,
    ("64x16384/128", "fp8_e4m3"): 32,
}


def measured(load: str, seconds: Iterable[float]) -> tuple[float, str]:
    """Returns the value of the fastest repeat, and its text: seconds for long loads, else tokens/s."""
    if load in LONG:
        value = min(seconds)
        return value, f"{value:.1f} s"
    value = output_tokens_per_second(load, seconds)
    return value, f"{value:.0f} tok/s"


def output_tokens_per_second(load: str, seconds: Iterable[float]) -> float:
    """Returns output tokens per second of the fastest repeat, since disturbances only slow a run."""
    requests, _, output = map(int, re.split("[x/]", load))
    return requests * output / min(seconds)


def rounds(*files: Any) -> dict[tuple[str, str], Any]:
    """Returns rounds by load and stored format."""
    return {(r["load"], r["stored"]): r for data in files for r in data["rounds"]}


def loads_file(commit: str, what: str) -> str:
    """Returns the JSON file of `kvant bench throughput` at a commit.

    what: the format, or a backend and it.
    """
    return f"h200-loads-{commit}-{what}.json"


FORMATS = {
    what: loads_file("22404fa", what) for what in ("bfloat16", "fp8", "fp8-per-token-head", "int4")
}
"""The file with every format in one call."""


@table("h200-throughput", *FORMATS.values())
def throughput(*files: Any) -> Cells:
    found = rounds(*files)
    formats = list(dict.fromkeys(stored for _, stored in found))
    lines = [["requests x input/output", *(cell for f in formats for cell in (f, "goal"))]]
    for load in dict.fromkeys(load for load, _ in found):
        cells = []
        for stored in formats:
            seconds = found[load, stored]["seconds"]
            goal, least = GOALS.get((load, stored)), load not in LONG
            value, shown = measured(load, seconds)
            cells.append(shown)
            cells.append("" if goal is None else held(value, goal, least=least, shown=f"{goal:g}"))
        lines.append([load.replace("x", " x "), *cells])
    held_by = {stored: r for (_, stored), r in found.items()}
    lines.append(
        ["the pool holds", *(c for f in formats for c in (f"{held_by[f]['capacity_tokens']:,d} tokens", ""))]
    )  # fmt: skip
    return lines


HEAVY = ("512x1024/256", "64x16384/128")
CALLS = tuple(
    loads_file(commit, what)
    for commit, *formats in (
        ("22404fa", "bfloat16", "fp8"),
        ("cc74c98", "bfloat16", "fp8"),
        ("fbb7665", "triton-fp8"),
        ("b4fa26c", "fp8", "triton-fp8"),
        ("ddec008", "bfloat16", "fp8", "triton-fp8"),
    )
    for what in formats
)
"""Files of heavy loads, oldest first; each call ran on another card."""


def backend(file: str) -> str:
    return "triton_fp8" if "triton-fp8" in file else "triton"


@table("h200-heavy-loads", *CALLS)
def heavy_loads(*calls: Any) -> Cells:
    lines = [["commit", "KV cache", "attention"]]
    lines[0] += [cell for load in HEAVY for cell in (load.replace("x", " x "), "repeats, seconds")]
    for file, data in sorted(zip(CALLS, calls, strict=True), key=lambda one: backend(one[0])):
        found = {load: r for (load, _), r in rounds(data).items()}
        cells = [data["commit"], data["rounds"][0]["stored"], backend(file)]
        for load in HEAVY:
            seconds = found[load]["seconds"] if load in found else ()
            cells.append(measured(load, seconds)[1] if seconds else "-")
            cells.append(", ".join(f"{one:.2f}" for one in seconds) or "-")
        lines.append(cells)
    return lines


@table("h200-invariance", "h200-invariance.json")
def invariance(on: Any) -> Cells:
    plain = rounds(on["off"])
    lines = [["load", "KV format", "off, out tok/s", "on", "difference"]]
    for (load, stored), r in sorted(rounds(on).items()):
        rates = [output_tokens_per_second(load, one["seconds"]) for one in (plain[load, stored], r)]
        lines.append(
            [load.replace("x", " x "), stored, *(f"{rate:.0f}" for rate in rates),
             percent(rates[1] / rates[0] - 1, sign=True)]
        )  # fmt: skip
    return lines


STEADY_GOALS = {"fp8_e4m3": 1.5, "fp8_per_token_head": 1.5, "int4_per_token_head": 2.0}
"""Goals in multiples of bfloat16."""
MIXED_GOAL = 1.03


@table("h200-steady-decode", "h200-decode.json")
def steady_decode(data: Any) -> Cells:
    lines = [
        ["KV cache", "bytes a token", "ms a step", "fastest and slowest", "times as fast", "goal"]
    ]
    step = uniform(data)
    for r in data["rows"]:
        if ";" in r["stored"]:
            continue
        times, speed = r["timing"]["milliseconds"], step["bfloat16"] / r["median_ms"]
        goal = STEADY_GOALS.get(r["stored"])
        lines.append(
            [r["stored"], f"{r['bytes_per_token']:,}", f"{r['median_ms']:.2f}",
             f"{min(times):.2f}, {max(times):.2f}", f"{speed:.2f}x",
             "" if goal is None else held(speed, goal, least=True)]
        )  # fmt: skip
    return lines


@table("h200-mixed-decode", "h200-decode.json")
def mixed_decode(data: Any) -> Cells:
    lines = [["KV cache", "layers in bfloat16", "ms a step", "sum over layers", "of that", "goal"]]
    for other, share, ms, expected in _mixed(data):
        ratio = ms / expected
        lines.append(
            [other, percent(share), f"{ms:.2f}", f"{expected:.2f}", f"{ratio:.3f}x",
             held(ratio, MIXED_GOAL)]
        )  # fmt: skip
    return lines


def mixed_ratios(data: Any) -> list[float]:
    return [ms / expected for _, _, ms, expected in _mixed(data)]


def _mixed(data: Any) -> Iterator[tuple[str, float, float, float]]:
    """Returns the other format, the share of bfloat16, milliseconds, and the expected milliseconds.

    Expected is the mean of the steps in which all layers have one format, weighted by layers.
    """
    step = uniform(data)
    size = {r["stored"]: r["bytes_per_token"] for r in data["rows"]}
    for r in data["rows"]:
        if ";" in r["stored"]:
            other = r["stored"].split(";")[0]
            share = (r["bytes_per_token"] - size[other]) / (size["bfloat16"] - size[other])
            expected = share * step["bfloat16"] + (1 - share) * step[other]
            yield other, share, r["median_ms"], expected


def uniform(data: Any) -> dict[str, float]:
    return {r["stored"]: r["median_ms"] for r in data["rows"] if ";" not in r["stored"]}
