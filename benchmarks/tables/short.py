"""docs/benchmarks/short.md: decode steps of short contexts on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, table
from benchmarks.tables.throughput import output_tokens_per_second

KERNELS, ENGINES = "h200-short-decode.json", "h200-short-engines.json"
EIGHT = "h200-short-decode-8.json"


@table("short-decode", KERNELS)
def kernels(found: Any) -> Cells:
    """Returns microseconds of one layer in bfloat16, by number of sequences and tokens."""
    rows = [row for row in found["rows"] if row["stored"] == "bfloat16"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = [
        [
            "sequences x tokens",
            *(f"{shape}, {kernel}" for shape in shapes for kernel in ("general", "short")),
        ]
    ]
    by_load: dict[tuple[int, int], list[str]] = {}
    for row in rows:
        cells = by_load.setdefault((row["sequences"], row["tokens"]), [])
        cells += [f"{row['general']:.1f}", f"{row['short']:.1f}"]
    return [*lines, *([f"{n} x {tokens}", *cells] for (n, tokens), cells in by_load.items())]


@table("short-decode-512", EIGHT)
def up_to_512_tokens(found: Any) -> Cells:
    """Returns the time of the short kernel over the general one's, by shape and tokens."""
    shapes = list(dict.fromkeys((row["shape"], row["tokens"]) for row in found["rows"]))
    ratios: dict[int, list[str]] = {}
    for row in found["rows"]:
        ratio = f"{row['short'] / row['general']:.2f}x"
        ratios.setdefault(row["sequences"], []).append(ratio)
    lines = [["sequences", *(f"{shape}, {tokens} tokens" for shape, tokens in shapes)]]
    return [*lines, *([str(n), *cells] for n, cells in ratios.items())]


@table("short-decode-8", KERNELS)
def eight_bits(found: Any) -> Cells:
    """Returns microseconds of one layer of Qwen3-8B's shape in 8 bits."""
    lines = [["stored", "sequences x tokens", "general", "short", "over general"]]
    for row in found["rows"]:
        if row["stored"] != "bfloat16":
            load = f"{row['sequences']} x {row['tokens']}"
            ratio = f"{row['short'] / row['general']:.2f}x"
            lines.append(
                [row["stored"], load, f"{row['general']:.1f}", f"{row['short']:.1f}", ratio]
            )
    return lines


@table("short-engines", ENGINES)
def engines(found: Any) -> Cells:
    """Returns tok/s of the best repeat with both kernels."""
    lines = [["model", "requests x input/output", "general", "short", "over general"]]
    speeds: dict[tuple[str, str], dict[str, float]] = {}
    for row in found["rows"]:
        speed = output_tokens_per_second(row["load"], row["seconds"])
        speeds.setdefault((row["model"], row["load"]), {})[row["kernel"]] = speed
    for (model, load), one in speeds.items():
        before, now = one["general"], one["short"]
        lines.append([model, load, f"{before:,.0f}", f"{now:,.0f}", f"{now / before:.2f}x"])
    return lines
