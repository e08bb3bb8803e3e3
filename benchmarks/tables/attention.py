"""docs/benchmarks/attention.md: kernels alone on a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, table

FILE = "h200-attention.json"
GENERAL = "h200-attention-general.json"
DENSE = "h200-attention-prompts.json"
MOST_OVER_PEER = 1.03
MOST_OVER_ONE_QUERY = 1.15
# Goals for one query: microseconds, and share of the time of bfloat16.
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


def rows(data: Any, case: str, *, causal: bool = True) -> dict[str, Any]:
    """Returns rows of a case by format; one name stands for K and V if they agree."""
    return {
        r["k"] if r["k"] == r["v"] else f"{r['k']}/{r['v']}": r
        for r in data["rows"]
        if r["case"] == case and r["causal"] == causal
    }


@table("attention-one-query", FILE)
def one_query(data: Any) -> Cells:
    found = rows(data, "B64 L8192")
    base = found["bfloat16"]["median_us"]
    lines = [["format", "us", "TB/s", "of read bandwidth", "over own bfloat16", "goal"]]
    for name, r in found.items():
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


@table("attention-16-queries-general", GENERAL)
@table("attention-16-queries", FILE)
def sixteen_queries(data: Any) -> Cells:
    one = rows(data, "B64 L8192")
    causal = rows(data, "B64 L8192 16 queries")
    free = rows(data, "B64 L8192 16 queries", causal=False)
    lines = [["format", "causal us", "not causal us", "over own 1 query", "goal", "over bfloat16"]]
    for name, r in causal.items():
        ratio = r["median_us"] / one[name]["median_us"]
        over = r["median_us"] / causal["bfloat16"]["median_us"]
        lines.append(
            [name, f"{r['median_us']:.0f}", f"{free[name]['median_us']:.0f}", f"{ratio:.2f}",
             held(ratio, MOST_OVER_ONE_QUERY), f"{over:.2f}"]
        )  # fmt: skip
    return lines


@table("attention-other-batches", FILE)
def other_batches(data: Any) -> Cells:
    names = ("B1 L131072", "1 x 128k + 31 x 4k", "same tokens, uniform", "B1 L1024")
    long, mixed, uniform, short = (rows(data, name) for name in names)
    lines = [
        ["format", "B1 L131072 us", "one of 128k and 31 of 4k us", "32 of 8064 us (same tokens)",
         "skew", "B1 L1024 us"]
    ]  # fmt: skip
    skew = skews(data)
    for name in long:
        lines.append(
            [name, f"{long[name]['median_us']:.1f}", f"{mixed[name]['median_us']:.0f}",
             f"{uniform[name]['median_us']:.0f}", f"{skew[name]:.2f}", f"{short[name]['median_us']:.1f}"]
        )  # fmt: skip
    return lines


def skews(data: Any) -> dict[str, float]:
    """Returns times of one long sequence among short ones over an even batch of as many tokens."""
    even = rows(data, "same tokens, uniform")
    mixed = rows(data, "1 x 128k + 31 x 4k")
    return {name: r["median_us"] / even[name]["median_us"] for name, r in mixed.items()}


def _points(data: Any, page_size: int | None = None) -> dict[tuple[int, int], dict[str, float]]:
    """Returns microseconds by (batch, length) and engine, at this page size or at each engine's best."""
    points: dict[tuple[int, int], dict[str, float]] = {}
    for r in data["rows"]:
        if page_size in (None, r["page_size"]):
            at = points.setdefault((r["batch"], r["length"]), {})
            at[r["who"]] = min(r["median_us"], at.get(r["who"], float("inf")))
    return points


def _beside_best_peer(
    data: Any, page_size: int | None = None
) -> dict[tuple[int, int], tuple[float, float]]:
    """Returns Kvant's microseconds and its time over the best peer's, at every point that fits."""
    found = {}
    for place, at in _points(data, page_size).items():
        mine = at.pop("kvant", None)
        if mine is not None:
            found[place] = mine, mine / min(at.values())
    return found


def over_best_peer(data: Any, page_size: int | None = None) -> list[float]:
    """Returns Kvant's time over the best peer's, at every point that fits."""
    return [ratio for _, ratio in _beside_best_peer(data, page_size).values()]


@table("attention-grid-bfloat16", "h200-attention-grid-bfloat16.json")
@table("attention-grid-fp8", "h200-attention-grid-fp8.json")
def grid(data: Any) -> Cells:
    """Returns, for each engine's better page size, Kvant's microseconds and its time over the best peer's."""
    points = _beside_best_peer(data)
    lengths = sorted({length for _, length in points})

    def cell(place: tuple[int, int]) -> str:
        if place not in points:
            return "does not fit"
        mine, ratio = points[place]
        shown = f"{mine:.1f} ({ratio:.3f})"
        return f"**{shown}**" if ratio > MOST_OVER_PEER else shown

    return [
        ["sequences", *(f"{length // 1024}k" for length in lengths)],
        *(
            [str(batch), *(cell((batch, length)) for length in lengths)]
            for batch in sorted({batch for batch, _ in points})
        ),
    ]


def bits(name: str) -> int:
    """Returns bits per stored number, without scales."""
    return {"bfloat16": 16, "int4_per_token_head": 4, "nvfp4": 4}.get(name, 8)


@table("attention-dense", DENSE)
def dense(data: Any) -> Cells:
    lines = [["prompts", "heads, head size", "queries x keys, warps, stages", "us", "TFLOP/s"]]
    for r in data["dense_kernel"]:
        mask = "causal" if r["causal"] else "all keys"
        lines.append(
            [f"{r['sequences']} x {r['tokens']}, {mask}", f"{r['q_heads']}, {r['head_dim']}",
             f"{r['rows']} x {r['tile']}, {r['warps']}, {r['stages']}", str(r["us"]), str(r["tflops"])]
        )  # fmt: skip
    return lines
