"""What formats do to answers: docs/reliability.md's GSM8K."""

from __future__ import annotations

from typing import Any

from tables import Cells, table


@table("gsm8k", "smollm2-gsm8k.json")
def gsm8k(data: Any) -> Cells:
    lines = [["KV format", "B/token", "mean log-likelihood", "drift a token", "right"]]
    for r in data["rows"]:
        lines.append(
            [r["format"], f"{r['bytes_per_token']:,}", f"{r['mean_logprob']:.4f}", f"{r['drift']:.4f}",
             f"{r['right']} of {data['problems']}"]
        )  # fmt: skip
    return lines
