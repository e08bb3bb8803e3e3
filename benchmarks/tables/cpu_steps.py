"""Whole steps on a CPU beside peers: README, docs/benchmarks/cpu.md."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tables import Cells, held, table


def median_ms(row: Any) -> float:
    return float(statistics.median(ms for found in row["rounds"] for ms in found))


def tokens_per_second(row: Any) -> float:
    return float(1000 * row["tokens"] / median_ms(row))


@table("demo-speed", "demo.json")
def demo(data: Any) -> Cells:
    cases = list(dict.fromkeys(r["case"] for r in data["speed"]))
    found = {(r["engine"], r["case"]): f"{tokens_per_second(r):.1f}" for r in data["speed"]}
    lines = [["float32 KV, tokens/s", *cases]]
    for engine in dict.fromkeys(engine for engine, _ in found):
        lines.append([engine, *(found[engine, case] for case in cases)])
    return lines


PARTS = ("cpu-float32.json", "cpu-int8.json", "cpu-int4.json")


def _steps(data: Any) -> Cells:
    lines = [
        ["what", "engine", "weights", "KV", "ms, rounds' medians", "tokens/s", "Kvant's over it"]
    ]
    ours = {
        r["case"]: tokens_per_second(r) for r in reversed(data["steps"]) if r["engine"] == "Kvant"
    }
    for r in data["steps"]:
        speed = tokens_per_second(r)
        rounds = ", ".join(f"{statistics.median(found):.1f}" for found in r["rounds"])
        over = "" if r["engine"] == "Kvant" else f"{ours[r['case']] / speed:.2f}"
        lines.append(
            [r["case"], r["engine"], r["weights"], r["kv"], rounds, f"{speed:.1f}", over or "-"]
        )
    return lines


for _file in (*PARTS, "cpu-context.json"):
    table(_file.removesuffix(".json"), _file)(_steps)


@table("cpu-gguf", "cpu-gguf.json")
def gguf(data: Any) -> Cells:
    peers = {
        (r["case"], r["weights"]): tokens_per_second(r)
        for r in data["steps"]
        if r["engine"] != "Kvant"
    }
    lines = [
        [
            "what",
            "file",
            "llama.cpp, tokens/s",
            "Kvant",
            "over it",
            "Kvant, activations int8",
            "over it",
        ]
    ]
    found = {
        (r["case"], r["weights"]): tokens_per_second(r)
        for r in data["steps"]
        if r["engine"] == "Kvant"
    }
    for (case, weights), peer in peers.items():
        own, rounded = found[case, weights], found[case, f"{weights}, activations int8"]
        lines.append(
            [case, weights, f"{peer:.1f}", f"{own:.1f}", f"{own / peer:.2f}", f"{rounded:.1f}",
             f"{rounded / peer:.2f}"]
        )  # fmt: skip
    return lines


@table("cpu-random-models", "cpu-experts-100m.json", "cpu-hybrid-100m.json")
def random_models(*parts: Any) -> Cells:
    lines = [["model", "what", "dtype", "transformers, tokens/s", "Kvant", "over it"]]
    for data, name in zip(parts, ("qwen3-moe-98m", "qwen3.5-125m"), strict=True):
        # transformers names the dtype that was asked for; Kvant adds what it is.
        found = {
            (r["engine"], r["case"], r["weights"].split(" (")[0]): tokens_per_second(r)
            for r in data["steps"]
        }
        for (engine, case, weights), speed in found.items():
            if engine == "Kvant":
                peer = found["transformers", case, weights]
                dtype = weights.split("dtype ")[1]
                lines.append(
                    [name, case, dtype, f"{peer:.1f}", f"{speed:.1f}", f"{speed / peer:.2f}"]
                )
    return lines


def _found(data: Any, engine: str, case: str, kv: str = "") -> float:
    """Returns tokens per second of the only row with these values."""
    (row,) = [
        r
        for r in data["steps"]
        if (r["engine"], r["case"]) == (engine, case) and kv in ("", r["kv"])
    ]
    return tokens_per_second(row)


@table("cpu-steps-goals", *PARTS, "cpu-context.json")
def goals(float32: Any, int8: Any, int4: Any, context: Any) -> Cells:
    one, eight = "decode, batch 1, 128 tokens", "decode, batch 8, 128 tokens"
    prompt, long = "prefill, batch 1, 2048 tokens", "decode, batch 8, 4096 tokens"
    lines = [["what", "measured", "goal, at least"]]

    def add(what: str, value: float, goal: float, unit: str) -> None:
        shown = f"{value:.1f} tokens/s" if unit else f"{value:.2f}x"
        lines.append([what, shown, held(value, goal, least=True, shown=f"{goal:g}{unit or 'x'}")])

    def over(data: Any, case: str, peer: str) -> float:
        return _found(data, "Kvant", case) / _found(data, peer, case)

    add("decode, batch 1, float32 weights", _found(float32, "Kvant", one), 30, " tokens/s")
    add("... over llama.cpp F32", over(float32, one, "llama.cpp"), 1, "")
    add("decode, batch 8, all together", _found(float32, "Kvant", eight), 150, " tokens/s")
    add("... over transformers", over(float32, eight, "transformers"), 2, "")
    add("decode, batch 1, int8 weights", _found(int8, "Kvant", one), 90, " tokens/s")
    add("decode, batch 1, int4 weights", _found(int4, "Kvant", one), 110, " tokens/s")
    add("prefill 2048 over transformers", over(float32, prompt, "transformers"), 1.6, "")
    add("... over llama.cpp F32", over(float32, prompt, "llama.cpp"), 1, "")
    base = _found(context, "Kvant", long, "float32")
    for kv, goal in (("int8_per_token_head", 1.15), ("int4_per_token_head", 1.05)):
        ratio = _found(context, "Kvant", long, kv) / base
        add(f"decode, batch 8 at 4096 tokens: {kv} KV over float32 KV", ratio, goal, "")
    return lines


@table("startup", "startup.json")
def startup(data: Any) -> Cells:
    lines = [["cache", "first token of `kvant chat` after, s"]]
    return lines + [[start["cache"], f"{start['seconds']:.2f}"] for start in data["starts"]]


@table("startup-parts", "startup.json")
def startup_parts(data: Any) -> Cells:
    found = [start["parts"] for start in data["starts"] if start["parts"]]
    lines = [["part, with a filled cache", "s, median"]]
    return lines + [[name, f"{statistics.median(p[name] for p in found):.2f}"] for name in found[0]]


@table("starts-beside", "cpu-starts-beside.json")
def starts_beside(data: Any) -> Cells:
    lines = [["files before the start", "commit", "first token after, s", "least", "CPU time, s"]]
    pairs = dict.fromkeys((start["files"], start["commit"]) for start in data["starts"])
    for files, commit in sorted(pairs, reverse=True):
        found = [one for one in data["starts"] if (one["files"], one["commit"]) == (files, commit)]
        seconds, cpu = ([one[key] for one in found] for key in ("seconds", "cpu"))
        values = statistics.median(seconds), min(seconds), statistics.median(cpu)
        lines.append([files, commit, *(f"{value:.2f}" for value in values)])
    return lines
