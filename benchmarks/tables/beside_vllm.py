"""Kvant and vLLM in one call on one GPU: README, docs/benchmarks/throughput.md and serving.md."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, percent, table
from benchmarks.tables.throughput import backend, loads_file, measured, rounds

SERVERS = "h200-servers.json"
CALLS = (
    ("h200-vllm-ddec008-bfloat16.json", loads_file("ddec008", "bfloat16")),
    (
        "h200-vllm-b4fa26c-fp8.json",
        loads_file("b4fa26c", "fp8"),
        loads_file("b4fa26c", "triton-fp8"),
    ),
)
"""Files of calls in which vLLM and Kvant ran on one GPU, one call per KV format."""
SHAPES = {
    "qwen3-30b-a3b": 1.1,
    "qwen3-30b-a3b-512": 1.1,
    "qwen3.5-9b": 1.2,
    "qwen3.5-9b-many": 1.2,
    "qwen3.5-9b-512": 1.2,
    "gemma-3-12b": 1.1,
    "gemma-3-12b-long": 1.1,
    "gpt-oss-20b": 1.1,
    "gpt-oss-20b-mxfp4": 1.1,
    "qwen3-8b-fp8": 1.1,
}
"""Shapes that both ran on one kind of GPU, and the least ratio of output tokens per second that is wanted.

-many, -512, -long: loads of the same shape in another call.
"""


def shape_files(shape: str) -> tuple[str, str]:
    """Returns the JSON files of vLLM's and of Kvant's loads of a shape."""
    return f"h200-vllm-{shape}.json", f"h200-loads-{shape}.json"


@table("beside-vllm", *(file for call in CALLS for file in call))
def throughput(*files: Any) -> Cells:
    """Returns figures of the fastest repeat; a ratio above 1 is in Kvant's favour."""
    by_load = [{load: r for (load, _), r in rounds(data).items()} for data in files]
    found = dict(zip((file for call in CALLS for file in call), by_load, strict=True))
    loads = list(found[CALLS[0][0]])
    lines = [["requests x input/output", *(cell for call in CALLS for cell in _heads(call, found))]]
    for load in loads:
        cells = [load.replace("x", " x ")]
        for theirs, *ours in _call_rounds(found, load):
            cells.append(measured(load, theirs["seconds"])[1])
            for one in ours:
                seconds = one["seconds"] if one else ()
                cells.append(measured(load, seconds)[1] if one else "-")
                cells.append(f"{min(theirs['seconds']) / min(seconds):.2f}" if one else "-")
        lines.append(cells)
    for what, fact in (("the pool holds", "capacity_tokens"), ("until ready", "start_seconds")):
        cells = [what]
        for theirs, *ours in _call_rounds(found, "512x1024/256"):
            shown = [_fact(one[fact]) for one in (theirs, *ours)]
            cells += [shown[0], *(cell for one in shown[1:] for cell in (one, ""))]
        lines.append(cells)
    return lines


@table("beside-vllm-shapes", *(file for shape in SHAPES for file in shape_files(shape)))
def shapes(*files: Any) -> Cells:
    lines = [["shape", "requests x input/output", "vLLM", "Kvant", "over vLLM", "goal"]]
    for (shape, least), theirs, ours in zip(SHAPES.items(), files[::2], files[1::2], strict=True):
        for load, (vllm, kvant) in both(theirs, ours).items():
            ratio = min(vllm) / min(kvant)
            lines.append(
                [name_of(shape), load.replace("x", " x "), measured(load, vllm)[1],
                 measured(load, kvant)[1], f"{ratio:.2f}", held(ratio, least, least=True)]
            )  # fmt: skip
    return lines


def name_of(shape: str) -> str:
    return shape.removesuffix("-many").removesuffix("-512").removesuffix("-long")


def both(theirs: Any, ours: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Returns vLLM's and Kvant's seconds of every load that vLLM ran."""
    kvant = {load: r["seconds"] for (load, _), r in rounds(ours).items()}
    return {load: (r["seconds"], kvant[load]) for (load, _), r in rounds(theirs).items()}


def _call_rounds(found: dict[str, Any], load: str) -> list[list[Any]]:
    """Returns vLLM's and Kvant's round of a load, for each call; None if it did not run."""
    return [[found[file].get(load) for file in call] for call in CALLS]


def _heads(call: tuple[str, ...], found: dict[str, Any]) -> list[str]:
    theirs, *ours = call
    heads = [f"vLLM {next(iter(found[theirs].values()))['stored']}"]
    for file in ours:
        stored = next(iter(found[file].values()))["stored"]
        by = ", triton_fp8" if backend(file) == "triton_fp8" else ""
        heads += [f"Kvant {stored}{by}", "over vLLM"]
    return heads


def _fact(value: float) -> str:
    return f"{value:,d} tokens" if isinstance(value, int) else f"{value:.1f} s"


@table("servers", SERVERS)
def servers(data: Any) -> Cells:
    """Returns milliseconds, with one line for each rate and server."""
    lines = [
        ["requests/s", "server", "answered, failed", "out tok/s", "TTFT p50", "p99",
         "ITL p50", "p99", "a token p50", "whole answer p50"]
    ]  # fmt: skip
    for rate in dict.fromkeys(r["load"]["rate"] for r in data["servers"][0]["rounds"]):
        for server in data["servers"]:
            for one in server["rounds"]:
                if one["load"]["rate"] == rate:
                    lines.append([f"{rate:g}", server["name"], *_served(one)])
    return lines


def _served(one: Any) -> list[str]:
    counts = one["outcomes"]
    times = [one["ttft"]["p50"], one["ttft"]["p99"], one["itl"]["p50"], one["itl"]["p99"]]
    return [
        f"{counts['completed']}, {counts['failed'] + counts['refused']}",
        f"{one['output_tokens_per_second']:.0f}",
        *(f"{1e3 * seconds:.1f}" for seconds in (*times, one["tpot"]["p50"])),
        f"{1e3 * one['e2e']['p50']:.0f}",
    ]


@table("servers-ratios", SERVERS)
def ratios(data: Any) -> Cells:
    """Returns Kvant's time over another server's at the same rate: below 1 is in Kvant's favour."""
    kvant, *others = data["servers"]
    lines = [["Kvant over", "requests/s", "TTFT p50", "p99", "ITL p50", "p99", "whole answer p50"]]
    for other in others:
        for ours, theirs in zip(kvant["rounds"], other["rounds"], strict=True):
            assert ours["load"] == theirs["load"]
            times = [
                f"{ours[what][at] / theirs[what][at]:.2f}"
                for what, at in (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99"),
                                 ("e2e", "p50"))
            ]  # fmt: skip
            lines.append([other["name"], f"{ours['load']['rate']:g}", *times])
    return lines


@table("logits", "h200-logits.json")
def logits(data: Any) -> Cells:
    allowed = data["bound"] * data["rows"][0]["error"]
    lines = [["computed by", "KV cache", "error", "same likeliest token", "allowed"]]
    for row in data["rows"]:
        bound = f"{allowed:.2e}" if row["engine"] == "kvant" and row["bounded"] else "-"
        same = "-" if row["same_likeliest"] is None else percent(row["same_likeliest"], digits=1)
        lines.append(
            [row["engine"], row["stored"], f"{row['error']:.2e}",
             same, bound]
        )  # fmt: skip
    return lines
