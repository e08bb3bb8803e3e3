"""docs/benchmarks/serving.md and memory.md: a server on a GPU, and the GPU's memory."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, percent, table

START_GOALS = {"first": 60, "second": 30}
"""Seconds."""


@table("serving-starts", "h200-starts.json")
def starts(data: Any) -> Cells:
    lines = [["start", "commit", "cores", "beside it", "seconds to ready", "goal"]]
    for r in data["rows"]:
        met = held(r["seconds"], START_GOALS[r["start"]])
        lines.append(
            [r["start"], r["commit"], str(r["cores"]), r["beside"], f"{r['seconds']:.1f}", met]
        )
    return lines


@table("serving-beside", "h200-serving-beside.json")
def serving_beside(data: Any) -> Cells:
    lines = [
        ["call", "commit", "seconds of load", "tok/s", "first token p50, p99, ms",
         "next token p50, p99, ms", "whole answer p50, p99, ms"]
    ]  # fmt: skip
    for number, rounds in enumerate(data["rounds"], 1):
        for r in rounds:
            times = [f"{r[f'{k}_p50_ms']:.1f}, {r[f'{k}_p99_ms']:.1f}" for k in ("ttft", "e2e")]
            gaps = f"{r['itl_p50_ms']:.2f}, {r['itl_p99_ms']:.2f}"
            lines.append(
                [str(number), r["commit"], f"{r['seconds']:.0f}", f"{r['tokens_per_second']:.0f}",
                 times[0], gaps, times[1]]
            )  # fmt: skip
    return lines


@table("gpu-memory", "h200-memory.json")
def gpu_memory(data: Any) -> Cells:
    lines = [
        ["max_num_seqs", "max_model_len", "weights and pages, GiB", "used at the peak, GiB",
         "beside weights and pages, GiB", "counted, GiB", "counted too much, of the device"]
    ]  # fmt: skip
    for row in data["rows"]:
        stored, used = row["weights_gib"] + row["pages_gib"], max(row["used_gib"])
        counted = row["counted_beside_gib"]
        lines.append(
            [str(row["max_num_seqs"]), str(row["max_model_len"]), f"{stored:.2f}", f"{used:.2f}",
             f"{used - stored:.2f}", f"{counted:.2f}",
             percent((counted - used + stored) / row["device_gib"], digits=1)]
        )  # fmt: skip
    return lines


@table("gpu-memory-share", "h200-memory-share.json")
def gpu_memory_share(data: Any) -> Cells:
    lines = [
        ["max_num_seqs", "max_model_len", "planned, GiB", "pages of that, GiB", "used when ready, GiB",
         "used at the peak, GiB", "of the plan", "goal"]
    ]  # fmt: skip
    for r in data["rows"]:
        planned, peak = r["share"] * r["device_gib"], max(r["used_gib"])
        off = abs(peak / planned - 1)
        lines.append(
            [str(r["max_num_seqs"]), str(r["max_model_len"]), f"{planned:.2f}", f"{r['pages_gib']:.2f}",
             f"{r['used_gib'][0]:.2f}", f"{peak:.2f}", percent(peak / planned, digits=1),
             held(off, 0.05, shown="within 5 %")]
        )  # fmt: skip
    return lines
