"""Kvant and vLLM in one call on one GPU: README, docs/benchmarks/throughput.md and serving.md."""

from __future__ import annotations

from typing import Any

from tables import Cells, percent, table
from tables.throughput import LONG, output_tokens_per_second

KVANT = ("h200-throughput-bfloat16.json", "h200-throughput-fp8.json")
VLLM = ("h200-vllm-bfloat16.json", "h200-vllm-fp8.json")
PEER = {"bfloat16": "bfloat16", "fp8_e4m3": "fp8"}
SERVERS = "h200-servers.json"


def _rate(row: Any) -> float:
    return output_tokens_per_second(row["load"], row["seconds"])


@table("beside-vllm", *KVANT, *VLLM)
def throughput(*files: Any) -> Cells:
    """Of the fastest repeat; a ratio above 1 is in Kvant's favour."""
    both = [{(r["load"], r["stored"]): r for data in some for r in data["rounds"]}
            for some in (files[:2], files[2:])]  # fmt: skip
    ours, theirs = both
    lines = [["requests x input/output"]]
    for stored, peer in PEER.items():
        lines[0] += [f"vLLM {peer}", f"Kvant {stored}", "over vLLM"]
    for load in dict.fromkeys(load for load, _ in ours):
        cells = []
        for stored, peer in PEER.items():
            pair = theirs[load, peer], ours[load, stored]
            rates = [_rate(r) for r in pair]
            shown = [f"{min(r['seconds']):.1f} s" for r in pair] if load in LONG else [
                f"{rate:.0f} tok/s" for rate in rates]  # fmt: skip
            cells += [*shown, f"{rates[1] / rates[0]:.2f}"]
        lines.append([load.replace("x", " x "), *cells])
    for what, key, unit in (
        ("the pool holds", "capacity_tokens", ",d"),
        ("until ready", "start_seconds", ".1f"),
    ):
        cells = []
        for stored, peer in PEER.items():
            load = next(iter(ours))[0]
            pair = theirs[load, peer][key], ours[load, stored][key]
            end = " tokens" if key == "capacity_tokens" else " s"
            cells += [*(format(n, unit) + end for n in pair), ""]
        lines.append([what, *cells])
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
