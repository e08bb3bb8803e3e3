"""docs/benchmarks/cpu-weights.md: whole steps on a CPU by weight format and KV format."""

from __future__ import annotations

from typing import Any

from tables import Cells, percent, table

FILE = "cpu-weights.json"


@table("cpu-weights-steps", FILE)
def steps(data: Any) -> Cells:
    lines = [["weights", "KV", "what", "ms", "tokens/s", "of that Python"]]
    for row in data["steps"]:
        share = row["python_share"]
        lines.append(
            [row["weights"], row["kv"], row["case"], f"{row['median_ms']:.2f}",
             f"{row['tokens_per_second']:.1f}", "" if share is None else percent(share, digits=1)]
        )  # fmt: skip
    return lines


@table("cpu-weights-kv", FILE)
def kv(data: Any) -> Cells:
    long = [row for row in data["steps"] if row["case"] == "decode, batch 8, 4096 tokens"]
    plain = {r["weights"]: r["tokens_per_second"] for r in long if r["kv"] == "float32"}
    return [
        ["weights", "KV", "tokens/s", "over float32 KV"],
        *(
            [r["weights"], r["kv"], f"{r['tokens_per_second']:.1f}",
             f"{r['tokens_per_second'] / plain[r['weights']]:.2f}"]
            for r in long
        ),
    ]  # fmt: skip


@table("cpu-weights-quality", FILE)
def quality(data: Any) -> Cells:
    first = data["quality"][0]["mean_log_likelihood"]
    return [
        ["weights", "mean log-likelihood a token, nats", "against float32", "tokens"],
        *(
            [q["weights"], f"{q['mean_log_likelihood']:.5f}",
             f"{q['mean_log_likelihood'] - first:+.5f}", str(q["num_tokens"])]
            for q in data["quality"]
        ),
    ]  # fmt: skip
