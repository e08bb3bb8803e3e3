"""Kvant and vLLM in one call on one GPU: README, docs/benchmarks/throughput.md and serving.md."""

from __future__ import annotations

from typing import Any

from tables import Cells, table
from tables.throughput import output_tokens_per_second

KVANT = "h200-beside-kvant.json"
VLLM = ("h200-beside-vllm-bfloat16.json", "h200-beside-vllm-fp8.json")
PEER = {"bfloat16": "bfloat16", "fp8_e4m3": "fp8", "fp8_per_token_head": "fp8"}
SERVERS = "h200-servers.json"


def _rate(row: Any) -> float:
    return output_tokens_per_second(row["load"], row["seconds"])


@table("beside-vllm", KVANT, *VLLM)
def throughput(kvant: Any, *vllm: Any) -> Cells:
    """Output tokens a second, or what else is named; a ratio above 1 is in Kvant's favour."""
    ours = {(r["load"], r["stored"]): r for r in kvant["rounds"]}
    theirs = {(r["load"], r["stored"]): r for data in vllm for r in data["rounds"]}
    lines = [["requests x input/output", "vLLM bfloat16", "vLLM fp8"]]
    for stored in PEER:
        lines[0] += [f"Kvant {stored}", "over vLLM"]
    for load in dict.fromkeys(load for load, _ in ours):
        cells = [f"{_rate(theirs[load, stored]):.0f}" for stored in ("bfloat16", "fp8")]
        for stored, peer in PEER.items():
            rate = _rate(ours[load, stored])
            cells += [f"{rate:.0f}", f"{rate / _rate(theirs[load, peer]):.2f}"]
        lines.append([load.replace("x", " x "), *cells])
    for what, key, shown in (
        ("the pool holds, tokens", "capacity_tokens", ",d"),
        ("until ready, s", "start_seconds", ".1f"),
    ):
        peers = {f: next(r[key] for (_, s), r in theirs.items() if s == f) for f in PEER.values()}
        cells = [format(value, shown) for value in peers.values()]
        for stored, peer in PEER.items():
            value = next(r[key] for (_, s), r in ours.items() if s == stored)
            over = "-" if key == "start_seconds" else f"{value / peers[peer]:.2f}"
            cells += [format(value, shown), over]
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
        lines.append(
            [row["engine"], row["stored"], f"{row['error']:.2e}",
             f"{100 * row['same_likeliest']:.1f} %", bound]
        )  # fmt: skip
    return lines
