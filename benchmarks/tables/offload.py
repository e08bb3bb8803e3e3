"""docs/offload.md: what tiers save."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, table


@table("agent-trace", "cpu-agent-trace.json")
def agents(run: Any) -> Cells:
    lines = [["host tier", "tokens of all turns", "computed", "computed again", "restored"]]
    for row in run["rows"]:
        lines.append(
            ["yes" if row["host_tier"] else "no", f"{row['prompt_tokens']:,}", f"{row['computed']:,}",
             f"{row['again']:,}", f"{row['restored']:,}"]
        )  # fmt: skip
    return lines
