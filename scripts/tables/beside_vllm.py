"""Kvant and vLLM in one call on one GPU: README, docs/benchmarks/throughput.md and serving.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables import Cells, percent, table
from tables.throughput import measured, rounds

KVANT = ("h200-throughput-bfloat16.json", "h200-throughput-fp8.json")
VLLM = ("h200-vllm-bfloat16.json", "h200-vllm-fp8.json")
PEER = {"bfloat16": "bfloat16", "fp8_e4m3": "fp8"}
SERVERS = "h200-servers.json"
AGAIN = ("h200-again-fp8.json", "h200-again-triton-fp8.json", "h200-again-vllm-fp8.json")
"""fp8 caches in a call of their own, Kvant by decoding and by fp8 products."""


@table("beside-vllm", *KVANT, *VLLM)
def throughput(*files: Any) -> Cells:
    """Of the fastest repeat; a ratio above 1 is in Kvant's favour."""
    ours, theirs = rounds(*files[:2]), rounds(*files[2:])
    loads = list(dict.fromkeys(load for load, _ in ours))

    def line(what: str, load: str, cells: Callable[[Any, Any], list[str]]) -> list[str]:
        pairs = [(theirs[load, peer], ours[load, stored]) for stored, peer in PEER.items()]
        return [what, *(cell for pair in pairs for cell in cells(*pair))]

    def speeds(one: Any, other: Any) -> list[str]:
        shown = [measured(r["load"], r["seconds"])[1] for r in (one, other)]
        return [*shown, f"{min(one['seconds']) / min(other['seconds']):.2f}"]

    return [
        line("requests x input/output", loads[0],
             lambda one, other: [f"vLLM {one['stored']}", f"Kvant {other['stored']}", "over vLLM"]),
        *(line(load.replace("x", " x "), load, speeds) for load in loads),
        line("the pool holds", loads[0],
             lambda *pair: [*(f"{r['capacity_tokens']:,d} tokens" for r in pair), ""]),
        line("until ready", loads[0],
             lambda *pair: [*(f"{r['start_seconds']:.1f} s" for r in pair), ""]),
    ]  # fmt: skip


@table("beside-vllm-fp8", *AGAIN)
def fp8_products(*files: Any) -> Cells:
    """Of the fastest repeat; a ratio above 1 is in Kvant's favour."""
    decoded, multiplied, theirs = (
        {load: r for (load, _), r in rounds(one).items()} for one in files
    )
    lines = [["requests x input/output", "vLLM fp8", "Kvant triton", "over vLLM", "Kvant triton_fp8",
              "over vLLM"]]  # fmt: skip
    for load, peer in theirs.items():
        cells = [load.replace("x", " x "), measured(load, peer["seconds"])[1]]
        for ours in (decoded, multiplied):
            if load in ours:
                seconds = ours[load]["seconds"]
                ratio = min(peer["seconds"]) / min(seconds)
                cells += [measured(load, seconds)[1], f"{ratio:.2f}"]
            else:
                cells += ["-", "-"]
        lines.append(cells)
    return lines


@table("servers", SERVERS)
def servers(data: Any) -> Cells:
    """Milliseconds; one line for each rate and server."""
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
    """Kvant's time over another server's at the same rate: below 1 is in Kvant's favour."""
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
