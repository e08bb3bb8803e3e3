"""docs/benchmarks/cpu.md: attention alone on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables import Cells, held, table

FILE = "cpu.json"
SHOWN = 1  # of the runs: the middle one
ONE_QUERY = "1 query, 64k tokens"


def _decode(data: Any, case: str) -> Cells:
    lines = [
        ["format", "MB", "ms", "G elements/s a core", "of read bandwidth", "over float32"],
    ]
    for r in data["runs"][SHOWN]["rows"]:
        if r["case"] == case:
            lines.append(
                [r["what"], f"{r['bytes'] / 1e6:.1f}", f"{r['median_s'] * 1e3:.2f}",
                 f"{r['elements_per_s_per_thread'] / 1e9:.2f}", f"{r['of_read_bandwidth']:.2f}",
                 f"{r['over_float32']:.2f}"]
            )  # fmt: skip
    return lines


@table("cpu-one-query", FILE)
def one_query(data: Any) -> Cells:
    return _decode(data, ONE_QUERY)


@table("cpu-eight-queries", FILE)
def eight_queries(data: Any) -> Cells:
    return _decode(data, "8 queries of 8 sequences, 4k tokens each")


@table("cpu-prefill-attention", FILE)
def prefill(data: Any) -> Cells:
    lines = [["format", "ms", "GFLOP/s", "over float32"]]
    for r in data["runs"][SHOWN]["rows"]:
        if r["case"] == "prefill 2048":
            lines.append(
                [r["what"], f"{r['median_s'] * 1e3:.1f}", f"{r['gflops']:.0f}",
                 f"{r['over_float32']:.2f}"]
            )  # fmt: skip
    return lines


@table("cpu-attention-goals", FILE)
def goals(data: Any) -> Cells:
    names = range(1, len(data["runs"]) + 1)
    lines = [["1 query, 64k cached tokens", *(f"run {n}" for n in names), "in the middle run"]]

    def add(
        what: str, name: str, value: Callable[[Any], float], goal: float, *, least: bool = False
    ) -> None:
        found = [
            value(next(r for r in run["rows"] if (r["case"], r["what"]) == (ONE_QUERY, name)))
            for run in data["runs"]
        ]
        shown = f"at {'least' if least else 'most'} {goal:g}"
        middle = sorted(found)[len(found) // 2]
        lines.append(
            [
                f"{name}: {what}",
                *(f"{n:.2f}" for n in found),
                held(middle, goal, least=least, shown=shown),
            ]
        )

    add("G stored elements/s a core", "int8_per_token_head",
        lambda r: r["elements_per_s_per_thread"] / 1e9, 4, least=True)  # fmt: skip
    for name, goal in (
        ("int8_per_token_head", 0.5),
        ("fp8_e4m3", 0.6),
        ("fp8_per_token_head", 0.6),
        ("int4_per_token_head", 0.5),
    ):
        add("of float32's time", name, lambda r: r["over_float32"], goal)
    add("of measured read bandwidth", "float32", lambda r: r["of_read_bandwidth"], 0.8, least=True)
    return lines
