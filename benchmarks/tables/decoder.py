"""docs/benchmarks/decoder.md: families that Kvant's own decoder reads from its table of recipes."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, percent, table


@table("decoder-loads", "h200-decoder.json")
def loads(data: Any) -> Cells:
    lines = [["shape", "requests x input/output", "before, tok/s", "tok/s", "of the limit", "goal"]]
    for row in data["rows"]:
        before = "-" if row["before"] is None else f"{row['before']}"
        lines.append(
            [row["shape"], row["load"], before, f"{row['tok_s']:.0f}",
             percent(row["tok_s"] / row["limit"]), held(row["tok_s"], row["goal"], least=True)]
        )  # fmt: skip
    return lines
