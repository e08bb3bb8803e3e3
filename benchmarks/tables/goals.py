"""docs/benchmarks/README.md: every goal for GPUs, and its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.tables import (
    Cells,
    attention,
    beside_vllm,
    decoder,
    held,
    narrow,
    prompts,
    scheduler,
    serving,
    speculative,
    table,
    throughput,
)

FILES = {
    "kernels": attention.FILE,
    "grid": "h200-attention-grid-bfloat16.json",
    "prompts": prompts.FILE,
    "dense": attention.DENSE,
    "flashinfer": "h200-flashinfer.json",
    **{f"pool of {what}": throughput.FORMATS[what] for what in ("bfloat16", "fp8", "int4")},
    **{file: file for file in throughput.CALLS},
    "decode": "h200-decode.json",
    "replay": "h200-replay.json",
    "long": "h200-replay-long.json",
    "smollm2": "h200-smollm2-spec.json",
    "starts": "h200-starts.json",
    "logits": "h200-logits.json",
    "share": "h200-memory-share.json",
    "host": scheduler.FILE,
    "idle256": scheduler.IDLE_FILES[0],
    "idle1024": scheduler.IDLE_FILES[1],
    **decoder.FILES,
    "gemma-3-12b": decoder.SHORT,
    **{f"vLLM's {shape}": beside_vllm.shape_files(shape)[0] for shape in beside_vllm.SHAPES},
    **{f"Kvant's {shape}": beside_vllm.shape_files(shape)[1] for shape in beside_vllm.SHAPES},
    "faster qwen3.5-9b-many": decoder.TILES,
    "newest gemma-3-12b": decoder.MANY,
    "families": "h200-decoder.json",
    "windows": "h200-windows.json",
    "hybrid": decoder.HYBRID,
    "hits": "h200-hybrid-hits.json",
    "narrow": "h200-narrow-models.json",
    "experts": "h200-step-experts-fp8.json",
    "everything": "h200-fp8-everything.json",
    "card": "h200-card-24gb.json",
}
DECODE_US, LONG_US, SHORT_US = 515, {"bfloat16": 140, "fp8_e4m3": 85}, 8
OTHER_LIBRARY, OWN_KERNEL = 600, 450
CAPACITY = {"fp8": 2.0, "int4": 3.7}
HOST_MS = {256: 0.25, 1024: 0.6}
BESIDE_BFLOAT16 = 0.62
MOST_SKEWED = 1.15
WINDOWED_SEQUENCES = 75
HIT_SHARE = 0.05
ALL_FP8, ALL_FP8_LONG, CARD_TOKENS, MANY_EXPERTS = 11_000, 20, 200_000, 12_000
GROUPS = (
    ("fp8_e4m3",),
    ("fp8_per_token_head", "int8_per_token_head"),
    ("int4_per_token_head",),
    ("nvfp4", "turboquant_k4/turboquant_v4"),
    ("turboquant_k3/turboquant_v3",),
)
"""Formats with one goal."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal. least: it is a lower bound. note: text after the figure."""

    what: str
    value: float
    bound: float
    unit: str
    page: str
    data: Any
    least: bool = False
    digits: int = 2
    note: str = ""

    @property
    def outcome(self) -> str:
        return held(self.value, self.bound, least=self.least).partition(": ")[2]

    @property
    def is_met(self) -> bool:
        return self.outcome == "met"

    def cells(self) -> list[str]:
        side = "at least" if self.least else "at most"
        bound = f"{self.bound:.2f}" if self.unit == "x" else f"{self.bound:g}"
        outcome = self.outcome if self.is_met else f"**{self.outcome}**"
        return [self.what, f"{side} {bound}{self.unit}",
                f"{self.value:.{self.digits}f}{self.unit}{self.note}", outcome,
                self.link, str(self.data["commit"])]  # fmt: skip

    @property
    def link(self) -> str:
        return f"[{self.page.rpartition('/')[2]}]({self.page}.md)"


@table("gpu-goals", *FILES.values())
def goals(*files: Any) -> Cells:
    lines = [["what", "goal", "measured", "outcome", "page", "commit"]]
    return [*lines, *(goal.cells() for goal in _all(*files))]


@table("gpu-goals-by-page", *FILES.values())
def by_page(*files: Any) -> Cells:
    found = list(_all(*files))
    lines = [["page", "met", "missed"]]
    for page in dict.fromkeys(goal.page for goal in found):
        here = [goal for goal in found if goal.page == page]
        missed = [
            f"{goal.what}, {goal.outcome.removeprefix('missed ')}"
            for goal in here
            if not goal.is_met
        ]
        met = len(here) - len(missed)
        lines.append([here[0].link, f"{met} of {len(here)}", "; ".join(missed) or "none"])
    return lines


def _all(*files: Any) -> Iterator[Goal]:
    data = dict(zip(FILES, files, strict=True))
    yield from _one_query(data["kernels"], data["grid"])
    yield from _sixteen_queries(data["kernels"])
    yield from _prompts(data["prompts"], data["dense"], data["flashinfer"])
    yield from _loads(data)
    yield from _drafts(data)
    yield from _served(data)
    yield from _families(data)
    yield from _narrow(data["narrow"], data["everything"], data["card"], data["experts"])
    yield from _beside_vllm(data)


def _one_query(kernels: Any, grid: Any) -> Iterator[Goal]:
    us = {name: r["median_us"] for name, r in attention.rows(kernels, "B64 L8192").items()}
    at = {"page": "attention", "data": kernels}
    what = "1 query, 64 x 8192"
    yield Goal(f"{what}, bfloat16", us["bfloat16"], DECODE_US, " us", digits=0, **at)
    for page_size, whose in ((None, "each at its best pages"), (16, "all at pages of 16")):
        ratios = attention.over_best_peer(grid, page_size)
        above = sum(ratio > attention.MOST_OVER_PEER for ratio in ratios)
        yield Goal(
            f"1 query, bfloat16, grid over the best peer, {whose}: worst point",
            max(ratios), attention.MOST_OVER_PEER, "x", "attention", grid, digits=3,
            note=f", {above} of {len(ratios)} above",
        )  # fmt: skip
    for names in GROUPS:
        most, share = attention.GOALS[names[0]]
        worst = max(us[name] for name in names)
        if most is not None:
            yield Goal(f"{what}, {_worst(names)}", worst, most, " us", digits=0, **at)
        if share is not None:
            ratio = worst / us["bfloat16"]
            yield Goal(f"{what}, {_worst(names)}, over bfloat16", ratio, share, "x", **at)
    for name, most in LONG_US.items():
        long = attention.rows(kernels, "B1 L131072")[name]["median_us"]
        yield Goal(f"1 query, 1 x 131072, {name}", long, most, " us", digits=0, **at)
    short = attention.rows(kernels, "B1 L1024")["bfloat16"]["median_us"]
    yield Goal("1 query, 1 x 1024, bfloat16", short, SHORT_US, " us", digits=2, **at)
    short = next(
        r["median_us"]
        for r in grid["rows"]
        if (r["batch"], r["length"], r["who"], r["page_size"]) == (1, 1024, "kvant", 16)
    )
    what = "1 query, 1 x 1024, bfloat16, in the call of the grid"
    yield Goal(what, short, SHORT_US, " us", "attention", grid)
    skews = attention.skews(kernels).values()
    what = f"1 query, one of 128k among 31 of 4k over an even batch, worst of {len(skews)} formats"
    yield Goal(what, max(skews), MOST_SKEWED, "x", **at)


def _worst(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"worst of {', '.join(names)}"


def _sixteen_queries(kernels: Any) -> Iterator[Goal]:
    at = {"page": "attention", "data": kernels}
    one = attention.rows(kernels, "B64 L8192")
    many = attention.rows(kernels, "B64 L8192 16 queries")
    over = {name: r["median_us"] / one[name]["median_us"] for name, r in many.items()}
    for kind, bits in (("bfloat16", 16), ("8 bits", 8), ("4 bits", 4), ("turboquant", 0)):
        found = {name: ratio for name, ratio in over.items() if _bits(name) == bits}
        worst = max(found, key=lambda name: found[name])
        note = f", {min(found.values()):.2f}x at best" if len(found) > 1 else ""
        what = f"16 queries over 1, {'worst of ' if len(found) > 1 else ''}{kind}"
        yield Goal(what, found[worst], attention.MOST_OVER_ONE_QUERY, "x", note=note, **at)
    ratio = many["fp8_e4m3"]["median_us"] / many["bfloat16"]["median_us"]
    yield Goal("16 queries, fp8_e4m3 over bfloat16", ratio, BESIDE_BFLOAT16, "x", **at)


def _bits(name: str) -> int:
    """Returns bits per stored number; 0 for turboquant, whose sides differ."""
    return 0 if "/" in name else attention.bits(name)


def _prompts(found: Any, dense: Any, flashinfer: Any) -> Iterator[Goal]:
    at = {"page": "attention", "data": found, "unit": " TFLOP/s", "least": True, "digits": 0}
    case = prompts.by_triton(found, "4 x 8192")["bfloat16"]
    peer = next(r for r in flashinfer["rows"] if r["case"] == "prefill 4x8192")
    # The same work: as many operations in another time.
    other = case["tflops"] * case["median_us"] / median(peer["flashinfer_us"])
    own = max(
        r["tflops"]
        for r in dense["dense_kernel"]
        if (r["sequences"], r["tokens"], r["q_heads"], r["head_dim"]) == (4, 8192, 32, 128)
        and r["causal"]
    )
    yield Goal(
        "prompts of 4 x 8192, bfloat16, cuDNN", case["tflops"], prompts.LIBRARY_GOAL, **at
    )  # fmt: skip
    yield Goal(
        "prompts of 4 x 8192, bfloat16, FlashInfer", other, OTHER_LIBRARY,
        **{**at, "page": "flashinfer", "data": flashinfer},
    )  # fmt: skip
    yield Goal(
        "prompts of 4 x 8192, bfloat16, Kvant's own kernel", own, OWN_KERNEL,
        **{**at, "data": dense},
    )  # fmt: skip
    speeds = prompts.prefix_speeds(found)
    for number, least in prompts.PREFIX_GOALS.items():
        worst = min(speed for name, speed in speeds.items() if attention.bits(name) == number)
        what = f"prompts of 2048 after 32768, speed over bfloat16, worst of {number} bits"
        yield Goal(what, worst, least, "x", "attention", found, least=True)


def _loads(data: dict[str, Any]) -> Iterator[Goal]:
    for (load, stored), bound in throughput.GOALS.items():
        long = load in throughput.LONG
        for by in ("triton", "triton_fp8") if long and stored == "fp8_e4m3" else ("triton",):
            calls = [data[file] for file in throughput.CALLS if throughput.backend(file) == by]
            runs = [
                (r, call) for call in calls if (r := throughput.rounds(call).get((load, stored)))
            ]
            values = [throughput.measured(load, r["seconds"])[0] for r, _ in runs]
            digits = 1 if long else 0
            low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
            yield Goal(
                f"{load.replace('x', ' x ')}, {stored}"
                + ("" if by == "triton" else f", --attention-backend {by}"),
                values[-1], bound, " s" if long else " tok/s", "throughput", runs[-1][1],
                least=not long, digits=digits, note=f"; {low} to {high} in {len(runs)} calls",
            )  # fmt: skip
    pool = {name: data[f"pool of {name}"]["rounds"][0] for name in ("bfloat16", *CAPACITY)}
    for name, least in CAPACITY.items():
        times = pool[name]["capacity_tokens"] / pool["bfloat16"]["capacity_tokens"]
        what = f"tokens in the pool, {pool[name]['stored']} over bfloat16"
        yield Goal(what, times, least, "x", "throughput", data[f"pool of {name}"], least=True)
    decode = data["decode"]
    step = throughput.uniform(decode)
    for name, least in throughput.STEADY_GOALS.items():
        speed = step["bfloat16"] / step[name]
        what = f"steps of 32 x 16384, {name} over bfloat16"
        yield Goal(what, speed, least, "x", "throughput", decode, least=True)
    mixed = throughput.mixed_ratios(decode)
    what = f"steps of 32 x 16384, layers of two formats over their shares, worst of {len(mixed)}"
    yield Goal(what, max(mixed), throughput.MIXED_GOAL, "x", "throughput", decode, digits=3)


def _drafts(data: dict[str, Any]) -> Iterator[Goal]:
    replay, long, small = data["replay"], data["long"], data["smollm2"]
    for requests, speed in speculative.speedups(replay).items():
        what = f"drafts, {requests} request{'s' if requests > 1 else ''}, over plain decoding"
        yield Goal(what, speed, speculative.GOALS[requests], "x", "speculative", replay, least=True)
    rates = {name: median(all_) for name, all_ in speculative.rates(long).items()}
    for name, least in speculative.LONG_GOALS.items():
        what = f"drafts, 16 x 32768, {name} over bfloat16"
        ratio = rates[name] / rates["bfloat16"]
        yield Goal(what, ratio, least, "x", "speculative", long, least=True)
    for r in small["rows"]:
        if not r["batch_invariant"]:
            what = f"SmolLM2 with its drafter, {r['target_kv']}, over plain decoding"
            speed, least = r["speedup"], speculative.SMALL_GOAL
            yield Goal(what, speed, least, "x", "speculative", small, least=True)


def _served(data: dict[str, Any]) -> Iterator[Goal]:
    starts, logits, share, host = (data[name] for name in ("starts", "logits", "share", "host"))
    for which, most in serving.START_GOALS.items():
        newest = next(r for r in reversed(starts["rows"]) if r["start"] == which)
        assert newest["commit"] == starts["commit"]
        what = f"a server's {which} start"
        yield Goal(what, newest["seconds"], most, " s", "serving", starts, digits=1)
    theirs, ours = (r["error"] for r in logits["rows"][:2])
    what = "error of logits over transformers' own, bfloat16"
    yield Goal(what, ours / theirs, logits["bound"], "x", "serving", logits)
    off = max(abs(max(r["used_gib"]) / (r["share"] * r["device_gib"]) - 1) for r in share["rows"])
    yield Goal("memory used, off what was planned", 100 * off, 5, " %", "memory", share, digits=1)
    for r in host["whole"]:
        if r["sequences"] in HOST_MS:
            what = f"host's part of a step of {r['sequences']} sequences (2 cores of an AMD EPYC)"
            ms = r["median_us"] / 1e3
            yield Goal(what, ms, HOST_MS[r["sequences"]], " ms", "scheduler", host)
    for name in ("idle256", "idle1024"):
        for r in data[name]["rows"]:
            case, share = r["timing"]["case"], 100 * r["timing"]["idle"]["share"]
            what = f"device idle, steps of {case['batch']} x {case['context']}, {r['stored']}"
            idle = 100 * scheduler.MOST_IDLE
            yield Goal(what, share, idle, " %", "scheduler", data[name])


def _families(data: dict[str, Any]) -> Iterator[Goal]:
    speed: dict[str, Any] = {"unit": " tok/s", "page": "decoder", "least": True, "digits": 0}
    for shape, bounds in decoder.GOALS.items():
        found, newest = decoder.speeds(data[shape]), data.get(f"newest {shape}", {"rounds": ()})
        later = decoder.speeds(newest)
        for load, bound in bounds.items():
            what = f"{shape}, {load.replace('x', ' x ')}, bfloat16"
            value, by, note = found[load][0], data[shape], ""
            if load in later:
                value, by = later[load][0], newest
                calls = [round(value), *(call["tok_s"] for call in newest["other_calls"])]
                note = f"; {min(calls)} to {max(calls)} in {len(calls)} calls"
            yield Goal(what, value, bound, data=by, note=note, **speed)
    for row in data["families"]["rows"]:
        if row["shape"] not in decoder.GOALS:
            what = f"{row['shape']}, {row['load'].replace('x', ' x ')}, bfloat16"
            yield Goal(what, row["tok_s"], row["goal"], data=row, **speed)
    windows, hybrid, hits = data["windows"], data["hybrid"], data["hits"]
    what = "gemma-3-12b, sequences of 32768 that fit, fp8_per_token_head"
    fit = windows["sequences_32k"]
    yield Goal(what, fit, WINDOWED_SEQUENCES, "", "decoder", windows, least=True, digits=0)
    what = "qwen3.5-9b, 1 x 128/256, of the limit"
    _, share = decoder.speeds(hybrid)["1x128/256"]
    yield Goal(
        what, 100 * share, 100 * decoder.HYBRID_SHARE, " %", "hybrids", hybrid, least=True, digits=0
    )
    what = "qwen3.5-9b, first token of 30000 from the cache over a cold one"
    ratio = median(hits["prefix"]["hit"]) / median(hits["prefix"]["cold"])
    yield Goal(what, ratio, HIT_SHARE, "x", "hybrids", hits, digits=3)


def _narrow(found: Any, everything: Any, card: Any, experts: Any) -> Iterator[Goal]:
    page = "../weights"
    for model, requests, value, bound, revision in narrow.goals(found):
        what = f"{model}, {requests} x 128/256"
        at = {"commit": revision}
        yield Goal(what, value, bound, " tok/s", page, at, least=True, digits=0)
    what = "Qwen3-8B, fp8 weights, activations and KV"
    for run in (everything, everything["fast_sums"]):
        at = {"commit": run["commit"]}
        for row in run["loads"]:
            load, seconds = row["load"].replace("x", " x "), row["seconds"]
            most = row.get("max_num_batched_tokens")
            how = "" if most is None else f", fast sums, {most} tokens a step"
            if load == "512 x 1024/256":
                speed = 512 * 256 / seconds
                name = f"{what}{how}, {load}"
                yield Goal(name, speed, ALL_FP8, " tok/s", page, at, least=True, digits=0)
            else:
                yield Goal(f"{what}{how}, {load}", seconds, ALL_FP8_LONG, " s", page, at)
    what = "Qwen3-8B, int4 weights and KV in 24 GB, tokens that fit"
    yield Goal(what, card["pool_tokens"], CARD_TOKENS, "", page, card, least=True, digits=0)
    for cache, run in (
        ("bfloat16 KV, 16896 tokens a step", experts["large_steps"]),
        ("fp8 KV", experts["fp8_kv"]),
    ):
        what = f"Qwen3-30B-A3B, fp8 in blocks, {cache}, 512 x 1024/256"
        at = {"commit": run["commit"]}
        speed = 512 * 256 / min(run["loads"]["512x1024/256"])
        yield Goal(what, speed, MANY_EXPERTS, " tok/s", page, at, least=True, digits=0)


_SINCE = {"qwen3.5-9b-many": "hybrids"}
"""Pages of later calls without vLLM."""


def _beside_vllm(data: dict[str, Any]) -> Iterator[Goal]:
    """Yields the goals of every shape and load; a later call replaces an earlier one."""
    found: dict[str, Goal] = {}
    for shape, least in beside_vllm.SHAPES.items():
        ours = data[f"Kvant's {shape}"]
        for load, seconds in beside_vllm.both(data[f"vLLM's {shape}"], ours).items():
            ratio, page, by = min(seconds[0]) / min(seconds[1]), "throughput", ours
            tokens = {r.get("max_num_batched_tokens") for r in ours["rounds"]} - {None}
            note = "".join(f", {most} tokens a step" for most in tokens)
            since = data.get(f"faster {shape}")
            for r in () if since is None else since["rounds"]:
                if r["load"] == load:
                    ratio, page, by = min(seconds[0]) / min(r["seconds"]), _SINCE[shape], since
            what = f"{beside_vllm.name_of(shape)}, {load.replace('x', ' x ')}, over vLLM"
            found[what] = Goal(what, ratio, least, "x", page, by, least=True, note=note)
    yield from found.values()
