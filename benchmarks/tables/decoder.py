"""docs/benchmarks/decoder.md: families that Kvant's own decoder reads from its table of recipes."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import Cells, held, percent, table
from benchmarks.tables.throughput import output_tokens_per_second


@table("decoder-loads", "h200-decoder.json")
def loads(data: Any) -> Cells:
    lines = [["shape", "requests x input/output", "before, tok/s", "tok/s", "of the limit", "goal"]]
    for row in data["rows"]:
        before = "-" if row["before"] is None else f"{row['before']}"
        lines.append(
            [row["shape"], row["load"], before, f"{row['tok_s']:.0f}",
             percent(row["tok_s"] / row["limit"]), held(row["tok_s"], row["goal"], least=True)]
        )  # fmt: skip
    return lines


GOALS = {
    "gemma-3-12b": {"1x128/256": 160, "32x128/256": 4000},
    "qwen3-30b-a3b": {"1x128/256": 420, "32x128/256": 2200, "512x1024/256": 7500},
}


FILES = {
    "gemma-3-12b": "h200-rows-gemma-3-12b.json",
    "qwen3-30b-a3b": "h200-loads-qwen3-30b-a3b.json",
}


def speeds(data: Any) -> dict[str, tuple[float, float]]:
    """Returns tok/s of a shape's loads and the share of the limit that is."""
    if "loads" in data:  # of a script over the loop of `kvant bench throughput`
        return {load: (r["tok_s"], r["share"]) for load, r in data["loads"].items()}
    found = {
        r["load"]: (output_tokens_per_second(r["load"], r["seconds"]), r) for r in data["rounds"]
    }
    return {load: (speed, speed / r["limit"]) for load, (speed, r) in found.items()}


@table("decoder-rows", *FILES.values())
def rows(*data: Any) -> Cells:
    lines = [["shape", "requests x input/output", "tok/s", "of the limit", "goal"]]
    for shape, one in zip(FILES, data, strict=True):
        for load, (speed, share) in speeds(one).items():
            # The limit counts output tokens alone, so it says little of long prompts.
            shown = percent(share) if "x128/" in load else "-"
            goal = held(speed, GOALS[shape][load], least=True)
            lines.append([shape, load, f"{speed:.0f}", shown, goal])
    return lines


WIDE_HEADS = "h200-loads-gemma-3-12b-wide-heads.json"
LONG = "h200-loads-gemma-3-12b-long.json"
SHORT = "h200-loads-gemma-3-12b-short.json"


@table("short-contexts", SHORT)
def short_contexts(data: Any) -> Cells:
    return wide_heads(data)


MANY = "h200-loads-gemma-3-12b-32.json"


@table("gemma-32", MANY)
def gemma_32(data: Any) -> Cells:
    return wide_heads(data)


@table("wide-heads", WIDE_HEADS)
def wide_heads(data: Any) -> Cells:
    lines = [["gemma-3-12b, requests x input/output", "tok/s", "of the limit", "goal"]]
    for load, (speed, share) in speeds(data).items():
        goal = held(speed, GOALS["gemma-3-12b"][load], least=True)
        lines.append([load, f"{speed:.0f}", percent(share), goal])
    return lines


@table("long-prompts", LONG)
def long_prompts(data: Any) -> Cells:
    lines = [["gemma-3-12b, requests x input/output", "s", "prompt tok/s", "steps"]]
    for r in data["rounds"]:
        requests, length = (int(n) for n in r["load"].partition("/")[0].split("x"))
        seconds = min(r["seconds"])
        rate = requests * length / seconds
        lines.append([r["load"], f"{seconds:.1f}", f"{rate:.0f}", f"{r['steps']}"])
    return lines


@table("window-copies", "h200-window-copies.json")
def window_copies(data: Any) -> Cells:
    """Returns the better of an engine's repeats."""
    kernels = list(dict.fromkeys(r["kernel"] for r in data["engines"]))
    lines = [["gemma-3-12b, requests x input/output", *(f"{kernel}, tok/s" for kernel in kernels)]]
    for load in dict.fromkeys(r["load"] for r in data["engines"]):
        speeds = {
            k: [r["tok_s"] for r in data["engines"] if (r["kernel"], r["load"]) == (k, load)]
            for k in kernels
        }
        lines.append([load, *(f"{max(speeds[kernel]):.0f}" for kernel in kernels)])
    return lines


COPIED = "h200-loads-qwen3-30b-a3b-copied.json"
_BEFORE = FILES["qwen3-30b-a3b"]


@table("copied-experts", COPIED, _BEFORE, "h200-vllm-qwen3-30b-a3b.json")
def copied_experts(now: Any, before: Any, vllm: Any) -> Cells:
    return _since("qwen3-30b-a3b", 1.1, now, before, vllm)


TILES = "h200-loads-qwen3.5-9b-tiles.json"


@table(
    "tiles-of-states", TILES, "h200-loads-qwen3.5-9b-many.json", "h200-vllm-qwen3.5-9b-many.json"
)
def tiles_of_states(now: Any, before: Any, vllm: Any) -> Cells:
    return _since("qwen3.5-9b", 1.2, now, before, vllm)


NEIGHBOURS = "h200-loads-qwen3.5-9b-neighbours.json"


@table("states-side-by-side", NEIGHBOURS, TILES, "h200-vllm-qwen3.5-9b-many.json")
def states_side_by_side(now: Any, before: Any, vllm: Any) -> Cells:
    return _since("qwen3.5-9b", 1.2, now, before, vllm)


@table("steps-as-large", "h200-loads-qwen3.5-9b-512.json", "h200-vllm-qwen3.5-9b-512.json")
@table(
    "steps-as-large-experts",
    "h200-loads-qwen3-30b-a3b-512.json",
    "h200-vllm-qwen3-30b-a3b-512.json",
)
def steps_as_large(ours: Any, vllm: Any) -> Cells:
    """Returns Kvant's loads with two sizes of steps, beside vLLM in the same call."""
    lines = [["engine", "tokens a step", "steps", "tok/s", "over vLLM"]]
    (theirs,) = (output_tokens_per_second(r["load"], r["seconds"]) for r in vllm["rounds"])
    lines.append(["vLLM", f"{vllm['max_num_batched_tokens']}", "-", f"{theirs:.0f}", "-"])
    (large,), (usual,) = ours["rounds"], ours["default_steps"]["rounds"]
    for r, tokens in ((large, large["max_num_batched_tokens"]), (usual, 8192 + 512)):
        speed = output_tokens_per_second(r["load"], r["seconds"])
        lines.append(
            ["Kvant", f"{tokens}", f"{r['steps']}", f"{speed:.0f}", f"{speed / theirs:.2f}"]
        )
    return lines


def _since(shape: str, least: float, now: Any, before: Any, vllm: Any) -> Cells:
    """Returns the loads of `now` beside earlier calls of Kvant and vLLM."""
    what = f"{shape}, requests x input/output"
    lines = [[what, "tok/s", "before", "vLLM then", "over vLLM then", "goal"]]
    theirs = {r["load"]: output_tokens_per_second(r["load"], r["seconds"]) for r in vllm["rounds"]}
    for load, (speed, _) in speeds(now).items():
        ratio = speed / theirs[load]
        lines.append(
            [load, f"{speed:.0f}", f"{speeds(before)[load][0]:.0f}", f"{theirs[load]:.0f}",
             f"{ratio:.2f}", held(ratio, least, least=True)]
        )  # fmt: skip
    return lines


HYBRID = "h200-loads-qwen3.5-9b.json"
HYBRID_SHARE = 0.75


@table("hybrid-rows", HYBRID)
def hybrid(data: Any) -> Cells:
    lines = [["requests x input/output", "tok/s", "of the limit", "goal"]]
    for load, (speed, share) in speeds(data).items():
        goal = held(share, HYBRID_SHARE, least=True, shown="75 % of the limit")
        shown = percent(share) if "x128/" in load else "-"
        lines.append([load, f"{speed:.0f}", shown, goal if load.startswith("1x") else "-"])
    return lines
