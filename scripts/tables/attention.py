"""docs/benchmarks/attention.md: kernels alone on a GPU."""

from __future__ import annotations

from typing import Any

from tables import Cells, held, table

FILE = "h200-attention.json"
MANY_ROWS = "h200-many-rows.json"
# Of one query: microseconds, and share of the time of bfloat16.
GOALS: dict[str, tuple[float | None, float | None]] = {
    "bfloat16": (540, None),
    "fp8_e4m3": (290, 0.56),
    "fp8_per_token_head": (300, 0.58),
    "int8_per_token_head": (300, 0.58),
    "int4_per_token_head": (None, 0.40),
    "nvfp4": (None, 0.50),
}


def _of(data: Any, case: str, *, causal: bool = True) -> dict[str, Any]:
    """Rows of a case by format, K's name standing for both sides."""
    return {r["k"]: r for r in data["rows"] if r["case"] == case and r["causal"] == causal}


@table("attention-one-query", FILE)
def one_query(data: Any) -> Cells:
    rows = _of(data, "B64 L8192")
    base = rows["bfloat16"]["median_us"]
    lines = [["format", "us", "TB/s", "of read bandwidth", "over own bfloat16", "goal"]]
    for name, r in rows.items():
        us, share = GOALS.get(name, (None, None))
        ratio = r["median_us"] / base
        goals = []
        if us is not None:
            goals.append(held(r["median_us"], us, shown=f"{us:g} us"))
        if share is not None:
            goals.append(held(ratio, share, shown=f"{share:.2f}"))
        lines.append(
            [name, f"{r['median_us']:.0f}", f"{r['tb_per_s']:.2f}", f"{r['of_read_bandwidth']:.2f}",
             f"{ratio:.2f}", "; ".join(goals) or "none"]
        )  # fmt: skip
    return lines


@table("attention-16-queries-general", FILE)
@table("attention-16-queries", MANY_ROWS)
def sixteen_queries(data: Any) -> Cells:
    one = _of(data, "B64 L8192")
    causal = _of(data, "B64 L8192 16 queries")
    free = _of(data, "B64 L8192 16 queries", causal=False)
    lines = [["format", "causal us", "not causal us", "over own 1 query", "goal", "over bfloat16"]]
    for name, r in causal.items():
        ratio = r["median_us"] / one[name]["median_us"]
        over = r["median_us"] / causal["bfloat16"]["median_us"]
        lines.append(
            [name, f"{r['median_us']:.0f}", f"{free[name]['median_us']:.0f}", f"{ratio:.2f}",
             held(ratio, 1.15, shown="1.15"), f"{over:.2f}"]
        )  # fmt: skip
    return lines


@table("attention-other-batches", FILE)
def other_batches(data: Any) -> Cells:
    names = ("B1 L131072", "1 x 128k + 31 x 4k", "same tokens, uniform", "B1 L1024")
    long, mixed, uniform, short = (_of(data, name) for name in names)
    lines = [
        ["format", "B1 L131072 us", "one of 128k and 31 of 4k us", "32 of 8064 us (same tokens)",
         "skew", "B1 L1024 us"]
    ]  # fmt: skip
    for name in long:
        skew = mixed[name]["median_us"] / uniform[name]["median_us"]
        lines.append(
            [name, f"{long[name]['median_us']:.1f}", f"{mixed[name]['median_us']:.0f}",
             f"{uniform[name]['median_us']:.0f}", f"{skew:.2f}", f"{short[name]['median_us']:.1f}"]
        )  # fmt: skip
    return lines
