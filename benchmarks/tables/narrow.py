"""docs/weights.md: whole models with narrow weights on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.tables import Cells, held, table
from benchmarks.tables.throughput import output_tokens_per_second

_MODELS = {
    "Qwen3-8B, bfloat16": ("Qwen3-8B, bfloat16", None, None),
    "Qwen3-8B, fp8": ("Qwen3-8B, fp8, rows in blocks", 430, 9000),
    "Qwen3-8B, fp8, head bfloat16": ("Qwen3-8B, fp8, norms folded", None, None),
    "Qwen3-8B, int4": ("Qwen3-8B, int4, short contexts in one launch", 620, 9500),
    "Qwen3-8B, int4, head bfloat16": ("Qwen3-8B, int4, norms folded", None, None),
    "Qwen3-8B, GGUF as Q4_K_M": ("Qwen3-8B, GGUF as Q4_K_M", None, None),
    "Qwen3-8B, GGUF as Q8_0": ("Qwen3-8B, GGUF as Q8_0", None, None),
    "Qwen3-30B-A3B, bfloat16": ("qwen3-30b-a3b", None, None),
    "Qwen3-30B-A3B, fp8 in blocks": (
        "Qwen3-30B-A3B, fp8 blocks as stored, short contexts in one launch", 550, None,
    ),
    "gpt-oss-20b, bfloat16": ("gpt-oss-20b", None, None),
    "gpt-oss-20b, mxfp4": ("gpt-oss-20b, mxfp4 as stored, one checkpoint with vLLM", 450, 4500),
}  # fmt: skip
"""Lines of the table: the model's name in the JSON, and goals for 1 and for 32 requests in tok/s."""


@table("narrow-models", "h200-narrow-models.json", "h200-decoder.json")
def models(narrow: Any, wide: Any) -> Cells:
    speeds = dict(narrow["tokens_per_second"])
    for row in wide["rows"]:
        speeds.setdefault(row["shape"], {})[row["load"].partition("x")[0]] = row["tok_s"]
    lines = [["model", "1 request", "8", "32", "goal, 1 request", "goal, 32"]]
    for shown, (name, one, many) in _MODELS.items():
        found = speeds[name]
        lines.append(
            [shown, *(f"{found[n]:,.0f}" if n in found else "-" for n in ("1", "8", "32")),
             _goal(found["1"], one), _goal(found["32"], many)]
        )  # fmt: skip
    return lines


def goals(narrow: Any) -> Iterator[tuple[str, str, float, int, str]]:
    """Returns model, requests, tok/s, goal and revision, for every goal of a table's line."""
    for shown, (name, *bounds) in _MODELS.items():
        for requests, bound in zip(("1", "32"), bounds, strict=True):
            if bound is not None:
                found = narrow["tokens_per_second"][name]
                revision = found.get(f"revision of {requests}", found["revision"])
                yield shown, requests, found[requests], bound, revision


@table("turned-attention", "h200-turned-attention.json")
def turned_attention(found: Any) -> Cells:
    """Returns the least seconds of each load as tok/s, before and with the dropped change."""
    lines = [["weights", "requests x input/output", "before", "with it", "over before"]]
    for weights, loads in found["seconds"].items():
        for load, seconds in loads.items():
            old, new = (output_tokens_per_second(load, seconds[name]) for name in ("old", "new"))
            lines.append([weights, load, f"{old:,.0f}", f"{new:,.0f}", f"{new / old:.3f}"])
    return lines


@table("narrow-blocks", "h200-narrow-blocks.json")
def blocks(found: Any) -> Cells:
    """Returns tok/s of the best repeat with rows and with blocks, by call and load."""
    lines = [["H200 that reads, TB/s", "requests x input/output", "rows", "blocks", "over rows"]]
    for call in found["calls"]:
        speeds: dict[str, dict[str, float]] = {}
        for row in call["rows"]:
            speed = output_tokens_per_second(row["load"], row["seconds"])
            speeds.setdefault(row["load"], {})[row["x"]] = speed
        for load, one in speeds.items():
            rows, inner = one["rows"], one["blocks"]
            lines.append(
                [f"{call['bandwidth']:.2f}", load, f"{rows:,.0f}", f"{inner:,.0f}",
                 f"{inner / rows:.3f}"]
            )  # fmt: skip
    return lines


def _goal(speed: float, goal: int | None) -> str:
    return "-" if goal is None else held(speed, goal, least=True, shown=f"{goal:,}")
