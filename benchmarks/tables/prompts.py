"""docs/benchmarks/attention.md: attention of prompts, by backend and format."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, table
from benchmarks.tables.attention import bits

FILE = "h200-prompts.json"
LIBRARY_GOAL = 545
"""TFLOP/s of prompts of 8192 in bfloat16."""
PREFIX_GOALS = {8: 0.9, 4: 0.8}
"""Minimum speed relative to bfloat16 after a prefix, by bits of a stored number."""


def by_triton(data: Any, case: str) -> dict[str, Any]:
    """Returns rows of a case by format, for the backend that is the default."""
    return {
        r["format"]: r for r in data["rows"] if (r["case"], r["backend"]) == (case, "triton")
    }  # fmt: skip


def prefix_speeds(data: Any) -> dict[str, float]:
    return {name: r["over_bfloat16"] for name, r in by_triton(data, "2048 after 32768").items()}


@table("attention-prefix", FILE)
def prefix(data: Any) -> Cells:
    lines = [["format", "us", "speed over own bfloat16", "goal"]]
    for name, r in by_triton(data, "2048 after 32768").items():
        speed, least = r["over_bfloat16"], PREFIX_GOALS.get(bits(name))
        goal = "-" if least is None else held(speed, least, least=True, shown=f"{least:.2f}")
        lines.append([name, f"{r['median_us']:.0f}", f"{speed:.2f}", goal])
    return lines


@table("attention-prompts", FILE)
def new_prompts(data: Any) -> Cells:
    lines = [["prompts", "us", "TFLOP/s", "goal"]]
    for case in ("1 x 8192", "4 x 8192", "16 x 2048"):
        r = by_triton(data, case)["bfloat16"]
        goal = held(r["tflops"], LIBRARY_GOAL, least=True) if case == "4 x 8192" else "none"
        lines.append([case, f"{r['median_us']:.0f}", f"{r['tflops']:.0f}", goal])
    return lines


@table("prompt-attention", FILE)
def prompt_attention(data: Any) -> Cells:
    lines = [["prompts", "backend", "format", "us", "TFLOP/s", "speed over triton's bfloat16",
              "over triton, same format"]]  # fmt: skip
    for r in data["rows"]:
        over = ("-" if x is None else f"{x:.2f}" for x in (r["over_bfloat16"], r["over_triton"]))
        lines.append(
            [r["case"], r["backend"], r["format"], f"{r['median_us']:.0f}", f"{r['tflops']:.0f}", *over]
        )  # fmt: skip
    return lines
