"""docs/benchmarks/speculative.md: drafts on a CPU, and on an H200 with replayed acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.tables import Cells, held, table


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


@table("spec-compiled", "smollm2-spec-compiled.json")
def compiled(data: Any) -> Cells:
    return _table(data)


@table("h200-smollm2-spec", "h200-smollm2-spec.json")
def on_gpu(data: Any) -> Cells:
    head, *lines = _table(data)
    modes = ("on" if r["batch_invariant"] else "off" for r in data["rows"])
    goals = (held(r["speedup"], SMALL_GOAL, least=True) for r in data["rows"])
    return [
        ["batch-invariant", *head, "goal"],
        *([mode, *line, goal] for mode, line, goal in zip(modes, lines, goals, strict=True)),
    ]


SMALL_GOAL = 2.0
GOALS = {1: 4.5, 8: 3.6, 16: 2.6, 32: 2.0, 64: 1.4}
"""Goals in multiples of plain decoding, by number of requests."""


def _speeds(row: Any) -> list[float]:
    """Returns tokens per second of every repeat."""
    return [one["new"] / one["seconds"] for one in row["repeats"]]


def _pairs(data: Any) -> Iterator[tuple[Any, Any]]:
    """Returns rows without and with drafts, for equal numbers of requests."""
    plain = {r["requests"]: r for r in data["rows"] if not r["num_drafts"]}
    return ((plain[r["requests"]], r) for r in data["rows"] if r["num_drafts"])


def speedups(data: Any) -> dict[int, float]:
    """Returns speeds in multiples of plain decoding, by number of requests."""
    return {r["requests"]: median(_speeds(r)) / median(_speeds(p)) for p, r in _pairs(data)}


@table("h200-replay", "h200-replay.json")
def replay(data: Any) -> Cells:
    speedup = speedups(data)
    lines = [
        ["requests", "plain tok/s", "with drafts", "all repeats", "tokens a step", "speedup", "goal"]
    ]  # fmt: skip
    for plain, r in _pairs(data):
        requests = r["requests"]
        steps = sum(one["steps"] for one in r["repeats"])
        new = sum(one["new"] for one in r["repeats"])
        lines.append(
            [str(requests), f"{median(_speeds(plain)):.0f}", f"{median(_speeds(r)):.0f}",
             ", ".join(f"{one:.0f}" for one in _speeds(r)),
             f"{new / steps / requests:.2f}", f"{speedup[requests]:.2f}x",
             held(speedup[requests], GOALS[requests], least=True)]
        )  # fmt: skip
    return lines


LONG_GOALS = {"fp8_e4m3": 1.5, "int4_per_token_head": 1.8}
"""Goals in multiples of bfloat16."""


def rates(data: Any) -> dict[str, list[float]]:
    """Returns tokens per second of every repeat, by format."""
    return {r["stored"]: _speeds(r) for r in data["rows"]}


@table("h200-replay-long", "h200-replay-long.json")
def replay_long(data: Any) -> Cells:
    found = rates(data)
    base = median(found["bfloat16"])
    lines = [["KV cache", "tok/s", "all repeats", "over bfloat16", "goal"]]
    for stored, repeats in found.items():
        goal, ratio = LONG_GOALS.get(stored), median(repeats) / base
        lines.append(
            [stored, f"{median(repeats):.0f}", ", ".join(f"{one:.0f}" for one in repeats),
             f"{ratio:.2f}x", "" if goal is None else held(ratio, goal, least=True)]
        )  # fmt: skip
    return lines
