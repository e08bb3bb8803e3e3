"""docs/benchmarks/cpu-weights.md: whole steps on a CPU by weight format and KV format."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, percent, table

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


@table("cpu-weights-goals", FILE)
def goals(data: Any) -> Cells:
    found = {(r["weights"], r["kv"], r["case"]): r for r in data["steps"]}
    one, eight = "decode, batch 1, 128 tokens", "decode, batch 8, 128 tokens"
    long = "decode, batch 8, 4096 tokens"

    def speed(weights: str, case: str, kv: str = "float32") -> float:
        return float(found[weights, kv, case]["tokens_per_second"])

    def over(kv: str) -> float:
        return speed("float32", long, kv) / speed("float32", long)

    lines = [["goal", "measured", "at least"]]
    for what, value, goal in (
        ("tokens/s, batch 1, float32 weights", speed("float32", one), 30),
        ("tokens/s, batch 8, float32 weights", speed("float32", eight), 150),
        ("tokens/s, batch 1, int8 weights", speed("int8_weight_only", one), 90),
        ("tokens/s, batch 1, int4 weights", speed("int4_weight_only", one), 110),
    ):
        lines.append([what, f"{value:.1f}", held(value, goal, least=True)])
    for kv, least in (("int8_per_token_head", 1.15), ("int4_per_token_head", 1.05)):
        what = f"batch 8, 4096 tokens: {kv} over float32 KV"
        lines.append([what, f"{over(kv):.2f}", held(over(kv), least, least=True)])
    return lines


@table("cpu-weights-python", FILE)
def python(data: Any) -> Cells:
    lines = [["Python's share of a step, batch 1, 128 tokens", "measured", "at most"]]
    for r in data["steps"]:
        if r["case"] == "decode, batch 1, 128 tokens":
            share = r["python_share"]
            lines.append([r["weights"], percent(share, digits=1), held(share, 0.1, shown="10 %")])
    return lines


@table("weight-quality", "cpu-weight-quality.json")
def weight_quality(data: Any) -> Cells:
    formats = list(dict.fromkeys(row["kv"] for row in data["rows"]))
    lines = [["weights", *(f"KV {name}" for name in formats)]]
    for weights in dict.fromkeys(row["weights"] for row in data["rows"]):
        found = {row["kv"]: row for row in data["rows"] if row["weights"] == weights}
        lines.append([weights, *(_kl_and_same_top(found[kv], digits=5) for kv in formats)])
    return lines


@table("head-quality", "cpu-head-quality.json")
def head_quality(data: Any) -> Cells:
    heads = list(dict.fromkeys(row["head"] for row in data["rows"]))
    heads.sort(key=lambda head: head or "")
    lines = [["layers", *(f"head {'float32' if head is None else head}" for head in heads)]]
    for asked in dict.fromkeys(row["quantization"] for row in data["rows"]):
        found = {row["head"]: row for row in data["rows"] if row["quantization"] == asked}
        cells = [
            _kl_and_same_top(found[head], digits=4) if head in found else "-" for head in heads
        ]
        lines.append(["float32" if asked is None else f"`{asked}`", *cells])
    return lines


def _kl_and_same_top(row: Any, *, digits: int) -> str:
    """Returns a row's loss in words. Rounding can make a divergence slightly negative."""
    return f"{max(0.0, row['mean_kl']):.{digits}f}, {percent(row['same_top'], digits=1)}"
