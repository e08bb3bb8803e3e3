"""docs/benchmarks/attention.md: kernels alone on a GPU."""

from __future__ import annotations

from typing import Any

from tables import Cells, held, table

FILE = "h200-attention.json"
MANY_ROWS = "h200-many-rows.json"
TURBOQUANT = "h200-turboquant.json"
GRID = "h200-attention-grid.json"
CUTS = "h200-attention-cuts.json"
PROMPTS = "h200-attention-prompts.json"
MOST_OVER_PEER = 1.03
# Of one query: microseconds, and share of the time of bfloat16.
GOALS: dict[str, tuple[float | None, float | None]] = {
    "bfloat16": (540, None),
    "fp8_e4m3": (290, 0.56),
    "fp8_per_token_head": (300, 0.58),
    "int8_per_token_head": (300, 0.58),
    "int4_per_token_head": (None, 0.40),
    "nvfp4": (None, 0.50),
    "turboquant_k4/turboquant_v4": (None, 0.50),
    "turboquant_k3/turboquant_v3": (None, 0.70),
}


def _of(data: Any, case: str, *, causal: bool = True) -> dict[str, Any]:
    """Rows of a case by format, one name standing for both sides where they agree."""
    return {
        r["k"] if r["k"] == r["v"] else f"{r['k']}/{r['v']}": r
        for r in data["rows"]
        if r["case"] == case and r["causal"] == causal
    }


@table("attention-turboquant", TURBOQUANT)
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


@table("attention-grid", GRID)
def grid(data: Any) -> Cells:
    """Each peer at its better page size."""
    points: dict[tuple[str, int, int], dict[str, float]] = {}
    for r in data["rows"]:
        at = points.setdefault((r["format"], r["batch"], r["length"]), {})
        at[r["who"]] = min(r["median_us"], at.get(r["who"], float("inf")))
    peers = [who for who in dict.fromkeys(r["who"] for r in data["rows"]) if who != "kvant"]
    head = ["format", "batch", "tokens", "kvant us", *(f"{who} us" for who in peers)]
    lines = [[*head, "over the best peer", "goal"]]
    for (name, batch, length), us in points.items():
        ratio = us["kvant"] / min(us[who] for who in peers)
        lines.append(
            [name, str(batch), str(length), f"{us['kvant']:.1f}", *(f"{us[who]:.1f}" for who in peers),
             f"{ratio:.2f}", held(ratio, MOST_OVER_PEER, shown=f"{MOST_OVER_PEER}")]
        )  # fmt: skip
    return lines


@table("attention-skew", CUTS)
def skew(data: Any) -> Cells:
    lines = [
        ["format", "one of 128k and 31 of 4k us", "32 of 8064 us (same tokens)", "skew", "goal"]
    ]
    for r in data["skew"]:
        ratio = r["skewed_us"] / r["uniform_us"]
        lines.append(
            [r["format"], f"{r['skewed_us']}", f"{r['uniform_us']}", f"{ratio:.2f}",
             held(ratio, 1.15, shown="1.15")]
        )  # fmt: skip
    return lines


@table("attention-cuts", CUTS)
def cuts(data: Any) -> Cells:
    lines = [["format", "batch", "tokens", "joined 8 at once us", "best cut of these programs us",
              "best cut of larger programs us"]]  # fmt: skip
    for r in data["cuts"]:
        if r["batch"] <= 4:
            own, large = r["best_of_these_programs"], r["best_of_larger_programs"]
            lines.append(
                [r["format"], str(r["batch"]), str(r["length"]), f"{r['joined_8_at_once_us']:.1f}",
                 f"{own['us']:.1f}", f"{large['us']:.1f}"]
            )  # fmt: skip
    return lines


@table("attention-prefix", PROMPTS)
def prefix(data: Any) -> Cells:
    rows = data["prefix_2048_over_32768"]
    base = next(r["us"] for r in rows if r["format"] == "bfloat16")
    lines = [["format", "us", "of that decoding us", "speed over own bfloat16", "goal"]]
    for r in rows:
        least = {"bfloat16": 1.0, "int4_per_token_head": 0.8, "nvfp4": 0.8}.get(r["format"], 0.9)
        speed = base / r["us"]
        goal = (
            "-"
            if r["format"] == "bfloat16"
            else held(speed, least, least=True, shown=f"{least:.2f}")
        )
        lines.append([r["format"], str(r["us"]), str(r["decoding_us"]), f"{speed:.2f}", goal])
    return lines


@table("attention-prompts", PROMPTS)
def prompts(data: Any) -> Cells:
    lines = [["prompts", "us", "TFLOP/s", "goal"]]
    for r in data["prompts"]:
        met = held(r["tflops"], 545, least=True, shown="545") if r["tokens"] == 8192 else "none"
        lines.append([f"{r['sequences']} x {r['tokens']}", str(r["us"]), str(r["tflops"]), met])
    return lines


@table("attention-dense", PROMPTS)
def dense(data: Any) -> Cells:
    lines = [["prompts", "heads, head size", "queries x keys, warps, stages", "us", "TFLOP/s"]]
    for r in data["dense_kernel"]:
        mask = "causal" if r["causal"] else "all keys"
        lines.append(
            [f"{r['sequences']} x {r['tokens']}, {mask}", f"{r['q_heads']}, {r['head_dim']}",
             f"{r['rows']} x {r['tile']}, {r['warps']}, {r['stages']}", str(r["us"]), str(r["tflops"])]
        )  # fmt: skip
    return lines
