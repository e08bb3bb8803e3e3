"""docs/benchmarks/attention.md: attention of prompts, by backend and format."""

from __future__ import annotations

from typing import Any

from tables import Cells, table

FILE = "h200-prompts.json"


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
