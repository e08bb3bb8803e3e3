"""docs/benchmarks/ranks.md: two ranks compared with one."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, table


@table("ranks", "h200-ranks.json")
def ranks(data: Any) -> Cells:
    lines = [["shape", "requests", "1 rank, tok/s", "2 ranks, tok/s", "2 over 1", "goal"]]
    best = {
        (r["shape"], r["requests"], r["ranks"]): (max(r["tok_s"]), r["goal"]) for r in data["rows"]
    }
    for (shape, requests, count), (two, goal) in best.items():
        if count == 1:
            continue
        one, _ = best[shape, requests, 1]
        lines.append(
            [shape, f"{requests}", f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}x",
             "-" if goal is None else held(two / one, goal, least=True)]
        )  # fmt: skip
    return lines


@table("rank-host", "h200-rank-host.json")
def host(data: Any) -> Cells:
    lines = [["sequences", "other processes", "host, us", "of it encoding and sending, us"]]
    for row in data["rows"]:
        sent = (a + b for a, b in zip(row["encode_us"], row["send_us"], strict=True))
        lines.append(
            [f"{row['sequences']}", row["processes"], " / ".join(f"{us:.0f}" for us in row["host_us"]),
             " / ".join(f"{us:.0f}" for us in sent)]
        )  # fmt: skip
    return lines
