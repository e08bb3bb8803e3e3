"""docs/benchmarks/speculative.md: drafts on a CPU."""

from __future__ import annotations

from typing import Any

from tables import Cells, table


def _table(data: Any) -> Cells:
    positions = len(data["rows"][0]["accepted_per_position"])
    lines = [
        ["target KV", "draft KV", "plain tok/s", "with drafts", "speedup", "tokens a step",
         *(f"{n}." for n in range(1, positions + 1)), "same answers"]
    ]  # fmt: skip
    for r in data["rows"]:
        lines.append(
            [r["target_kv"], r["draft_kv"], f"{r['plain_tokens_per_second']:.1f}",
             f"{r['tokens_per_second']:.1f}", f"{r['speedup']:.2f}x",
             f"{r['mean_acceptance_length']:.2f}", *(f"{p:.3f}" for p in r["accepted_per_position"]),
             f"{r['same_answers']} of {r['prompts']}"]
        )  # fmt: skip
    return lines


@table("spec-reference", "smollm2-spec.json")
def reference(data: Any) -> Cells:
    return _table(data)


@table("spec-cpu", "smollm2-spec-cpu.json")
def cpu(data: Any) -> Cells:
    return _table(data)
