"""docs/benchmarks/narrow.md and moe.md: the kernels that steps spend their time in, and other cuts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from benchmarks.tables import Cells, percent, table
from benchmarks.tables.throughput import output_tokens_per_second

_PRODUCTS = "gate_up", "down", "qkv", "output"
_HEAD = "one_row", "product", "nvjet_sm90_tst", "decode_tile"
"""Kernels that multiply by a head of 16 bits, or of one that is decoded."""

_CHANGES: dict[str, Callable[[list[int], list[int]], bool]] = {
    "other blocks ahead": lambda cut, own: cut[:2] == own[:2] and cut[3:] == own[3:],
    "other tiles or warps": lambda cut, own: cut[:2] != own[:2] and cut[3:] == own[3:],
    "more programs in a multiprocessor's registers": lambda cut, own: cut[3] > 1 and not cut[4],
    "L2 asked for 8 more blocks per warp": lambda cut, own: cut[4] > 0 and cut[3] == 1,
}  # fmt: skip
"""Kinds of cuts: whether a cut is of this kind, beside the engine's."""


@table("step-kernels", "h200-step-kernels.json")
def step_kernels(data: Any) -> Cells:
    lines = [["weights", "load", "us a step", *_PRODUCTS, "head", "attention", "the rest", "gaps"]]
    for row in data["rows"]:
        steps, shares = row["steps"], dict(_parts(row["steps"]))
        kind = "" if steps["kind"] == "decodes" else ", prompts too"
        head = row["head"] if row["head"] == "bfloat16" else f"head {row['head']}"
        label = row["weights"] if row["head"] == "bfloat16" else f"{row['weights']}, {head}"
        cells = [f"{shares[name][0]:,.0f}{shares[name][1]}" for name in (*_PRODUCTS, "head")]
        attention = shares["attention"][0]
        rest = steps["us"] - steps["gap_us"] - sum(value for value, _ in shares.values())
        lines.append(
            [label, row["load"] + kind, f"{steps['us']:,.0f}", *cells, f"{attention:,.0f}",
             f"{rest:,.0f}", f"{steps['gap_us']:,.0f}"]
        )  # fmt: skip
    return lines


@table("int4-one-row-cuts", "h200-int4-one-row-cuts.json")
def int4_one_row_cuts(data: Any) -> Cells:
    lines = [["changed from the engine's cuts", *_PRODUCTS]]
    first = [one for one in data["tried"] if one["round"] == 0]
    for name, chosen in _CHANGES.items():
        found = [
            min((one["us"] for one in first if one["product"] == product and chosen(
                one["cut"], [*data["engine_cuts"][product], 1, 0])), default=None)
            for product in _PRODUCTS
        ]  # fmt: skip
        lines.append([name, *("-" if us is None else f"{us:.1f}" for us in found)])
    return lines


@table("int4-engine-cuts", "h200-int4-one-row-cuts.json")
def int4_engine_cuts(data: Any) -> Cells:
    """Returns output tokens per second of one request, the fastest of an engine's rounds."""
    lines = [["tiles, warps and blocks ahead", "out tok/s"]]
    for engine in data["engines"]["seconds"]:
        cuts = ", ".join(
            f"{name} {', '.join(map(str, cut))}" for name, cut in engine["cuts"].items()
        )
        speed = output_tokens_per_second("1x128/256", engine["seconds"])
        lines.append([cuts or "the engine's", f"{speed:.0f}"])
    return lines


@table("fp8-prompt-products", "h200-fp8-prompt-products.json")
def fp8_prompt_products(data: Any) -> Cells:
    kinds = list(dict.fromkeys(one["kind"] for one in data["products"]))
    lines = [["", *kinds]]
    for product in _PRODUCTS:
        found = {one["kind"]: one for one in data["products"] if one["name"] == product}
        lines.append([product, *(f"{found[kind]['tflops']:,.0f}" for kind in kinds)])
    layers = {
        kind: [one["tflops"] for one in data["layers"] if one["kind"] == kind] for kind in kinds
    }
    lines.append(
        ["a layer, in 3 turns", *(f"{min(layers[k]):,.0f} to {max(layers[k]):,.0f}" for k in kinds)]
    )
    for label, numbers in (("mixed signs", ("normal", "gated")), ("one sign", ("positive",))):
        for product, columns in (("gate_up", "4,096"), ("down", "12,288")):
            rows = [
                one for one in data["errors"] if one["name"] == product and one["data"] in numbers
            ]
            worst = [max(row[_error(kind)] for row in rows) for kind in kinds]
            lines.append(
                [f"error, {label}, {columns} columns", *(f"{value:.1e}" for value in worst)]
            )
    return lines


def _error(kind: str) -> str:
    scales, sums = kind.split(", ")
    return f"{'one' if scales == 'one scale' else 'row'} {sums.split()[0]}"


_KEPT = {True: "yes", False: "no"}


@table("narrow-chains", "h200-narrow-chains.json")
def narrow_chains(data: Any) -> Cells:
    lines = [["change", "weights", "rows", "us a layer before", "with it", "kept"]]
    for row in data["rows"]:
        lines.append(
            [row["change"], row["weights"], str(row["tokens"]), f"{row['before_us']:.1f}",
             f"{row['after_us']:.1f}", _KEPT[row["kept"]]]
        )  # fmt: skip
    return lines


@table("narrow-traffic", "h200-narrow-parts.json")
def narrow_traffic(data: Any) -> Cells:
    """Bytes that programs read and write in one product, by the cut of its weight."""
    lines = [
        ["weights", "product", "outputs of a program", "parts", "weight, MB", "activations, MB",
         "sums, MB", "us", "all bytes, TB/s"]
    ]  # fmt: skip
    tokens = data["tokens"]
    for row in data["products"]:
        outputs, columns = row["shape"]
        bits = 8 if row["weights"] == "fp8" else 4 + (16 + 8) / 128  # with scales and zero points
        weight = outputs * columns * bits / 8
        activations = outputs / row["outputs_of_a_program"] * tokens * columns * 2
        sums = 2 * row["parts"] * outputs * tokens * 4 if row["parts"] > 1 else 0
        rate = (weight + activations + sums) / row["us"] / 1e6
        lines.append(
            [row["weights"], row["product"], str(row["outputs_of_a_program"]), str(row["parts"]),
             *(f"{part / 1e6:.1f}" for part in (weight, activations, sums)),
             f"{row['us']:.1f}", f"{rate:.1f}"]
        )  # fmt: skip
    return lines


_WITHOUT = {
    "whole": "all",
    "no activations": "without x",
    "no decoding": "without decoding",
    "no multiplication": "without products",
    "only copies of weights": "without decoding, x, products",
    "only decoding and multiplication": "without x, fetches",
}
"""Columns of the table, and what the copies of the kernel lack."""


@table("narrow-without", "h200-narrow-parts.json")
def narrow_without(data: Any) -> Cells:
    lines = [["weights", "product", *_WITHOUT]]
    for row in data["less"]:
        found = (f"{row['us'][name]:.1f}" for name in _WITHOUT.values())
        lines.append([row["weights"], row["product"], *found])
    return lines


@table("expert-decode", "h200-expert-decode.json")
def expert_decode(data: Any) -> Cells:
    """Returns each kernel's fastest bound on registers, for the engine's cut."""
    lines = [
        ["kernel", "gates and ups, us", "warps with registers", "down, us", "warps with registers"]
    ]
    for name in dict.fromkeys(row["kernel"] for row in data["rows"]):
        cells = [name]
        for product in ("gate_up", "down"):
            of = (name, product, [2, 2, 2])
            found = [r for r in data["rows"] if (r["kernel"], r["product"], r["cut"]) == of]
            best = min(found, key=lambda row: row["us"])
            bound = best["resident_warps"]
            cells += [f"{best['us']:.1f}", str(bound) if bound else "any"]
        lines.append(cells)
    return lines


def _parts(steps: Any) -> Iterator[tuple[str, tuple[float, str]]]:
    """Yields microseconds of each part of a step, and its share of the read bandwidth in words."""
    decodes = steps["kind"] == "decodes"
    for product in (*_PRODUCTS, "head"):
        found = [one for one in steps["kernels"] if one["product"] == product]
        if product == "head" and not found:
            found = [one for one in steps["kernels"] if one["name"].startswith(_HEAD)]
        share = next(
            (one["of_bandwidth"] for one in found if one["of_bandwidth"] is not None), None
        )
        words = f" ({percent(share)})" if decodes and share is not None else ""
        yield product, (sum(one["own_us"] for one in found), words)
    found = [
        one
        for one in steps["kernels"]
        if one["name"].startswith(("paged_attention", "combine", "cudnn", "rotate_and_store"))
    ]
    yield "attention", (sum(one["own_us"] for one in found), "")


_EXPERTS = {
    "gate and up of experts": ("many#1",),
    "down of experts": ("many#2",),
    "experts chosen and listed": ("route", "count_pairs", "sum_counts", "place_pairs"),
    "experts' results added": ("combine#2",),
    "attention": ("paged_attention", "cudnn", "combine#1", "gather_rows", "list_items"),
    "rotation": ("rotate_and_store",),
    "other products": ("nvjet",),
    "norms": ("_add_norm",),
}
"""Beginnings of the names of kernels. Other products: dense layers, routers and the head."""


@table("step-experts", "h200-step-experts.json")
def step_experts(data: Any) -> Cells:
    steps = [row["steps"] for row in data["rows"]]
    lines = [["part", *(f"{one['kind']}, us" for one in steps)]]
    found = [_experts(one) for one in steps]
    for name in found[0]:
        lines.append([name, *(f"{one[name]:,.0f}" for one in found)])
    return lines


@table("expert-tiles", "h200-expert-tiles.json")
def expert_tiles(data: Any) -> Cells:
    """Returns the fastest tile of each kernel."""
    lines = [["tokens", "product", "by pointers", "copied", "copied, TFLOP/s", "copied, TB/s"]]
    for tokens, product in dict.fromkeys((r["tokens"], r["product"]) for r in data["rows"]):
        some = [r for r in data["rows"] if (r["tokens"], r["product"]) == (tokens, product)]
        best = [
            min((r for r in some if r["tile"].startswith(way)), key=lambda r: float(r["us"]))
            for way in ("many", "copied")
        ]
        name = {"up": "gates and ups", "down": "down"}[product]
        lines.append(
            [f"{tokens:,}", name, *(f"{one['us']:.0f}" for one in best),
             f"{best[1]['tflops']:.0f}", f"{best[1]['tb_s']:.2f}"]
        )  # fmt: skip
    return lines


@table("experts-fp8", "h200-experts-fp8.json", "h200-expert-tiles.json")
def experts_fp8(narrow: Any, wide: Any) -> Cells:
    """Returns both products of experts with both kinds of weights, and the dense ones in fp8."""
    names = {"up": "gates and ups", "down": "down", "qkv": "q, k and v", "output": "output"}
    lines = [["tokens", "product", "bfloat16, us", "fp8, us", "fp8, TFLOP/s", "fp8, TB/s"]]
    for tokens in (8488, 512):
        for row in narrow["rows"]:
            if row["tokens"] != tokens or row["product"] not in names:
                continue
            copied = [
                float(one["us"])
                for one in wide["rows"]
                if (one["tokens"], one["product"]) == (tokens, row["product"])
                and one["tile"].startswith("copied")
            ]
            read = f"{row['tb_s']:.2f}" if "tb_s" in row else "-"
            lines.append(
                [f"{tokens:,}", names[row["product"]], f"{min(copied):.0f}" if copied else "-",
                 f"{row['us']:.0f}", f"{row['tflops']:.0f}", read]
            )  # fmt: skip
    return lines


_MANY_REQUESTS = {
    "products": ("nvjet*",),
    "head decoded": ("decode_tile",),
    "attention of prompts": ("fp8_prompts", "lay_out", "dense_attention"),
    "attention of decodes": ("paged_attention", "combine", "list_items"),
    "states, one token": ("_delta_step", "_delta_tiles"),
    "states, prompts": ("_within_chunks", "_over_chunks"),
    "convolutions": ("_conv_prompts", "_keep_last"),
    "gates and their rounding": ("_gate", "_gate_heads"),
    "norms and their rounding": ("_add_norm", "_gated_norm", "round_row"),
    "rotation and storing": ("rotate_and_store",),
    "tokens chosen": ("_most_likely",),
}
"""Names of kernels, with the head among the products."""


@table("fp8-own-products", "h200-fp8-own-products.json")
def own_products(data: Any) -> Cells:
    """Returns microseconds for 8,440 rows: of each product alone, and of layers for seconds."""
    names = ("qkv", "output", "gate_up", "down")
    lines = [["kernel", *names, "a layer, gates apart", "a layer, gates in the product"]]
    lasting = data["sustained_us_a_layer"]["8440"]
    for kernel, alone in data["alone_us"]["8440"].items():
        found = [
            lasting.get(f"{kernel}, {gates}") for gates in ("gates apart", "gates in the product")
        ]
        shown = ["-" if us is None else f"{min(us):,.0f} to {max(us):,.0f}" for us in found]
        lines.append([kernel, *(f"{alone[name]:,.0f}" for name in names), *shown])
    return lines


@table("power-512", "h200-power-512.json")
def power(data: Any) -> Cells:
    """Returns power and clock of whole seconds: in the middle of the prompts, and 3 s before the end."""
    lines = [["model", "tokens a step", "s", "with prompts", "only decodes"]]
    for run in data["runs"]:
        at = (len(run["watts"]) // 3, -4)
        shown = [f"{run['watts'][i]} W, {run['mhz'][i]:,} MHz" for i in at]
        tokens = f"{run['max_num_batched_tokens']:,}"
        lines.append([run["model"], tokens, f"{run['seconds']:.2f}", *shown])
    return lines


@table("fp8-steps", "h200-fp8-everything.json")
def fp8_steps(data: Any) -> Cells:
    """Returns loads of fp8 weights, activations and KV cache with fast sums, by the size of steps."""
    lines = [["requests x input/output", "tokens a step", "steps", "s", "repeats, s", "tok/s"]]
    for row in data["fast_sums"]["loads"]:
        speed = output_tokens_per_second(row["load"], row["repeats"])
        repeats = ", ".join(f"{seconds:.2f}" for seconds in row["repeats"])
        tokens = f"{row['max_num_batched_tokens']:,}"
        lines.append(
            [
                row["load"],
                tokens,
                f"{row['steps']}",
                f"{row['seconds']:.2f}",
                repeats,
                f"{speed:,.0f}",
            ]
        )
    return lines


@table("step-512", "h200-step-512.json")
def step_512(data: Any) -> Cells:
    rows = data["rows"]
    lines = [["part, us", *(f"{row['model']}: {row['kind']}" for row in rows)]]
    found = [_many_requests(row) for row in rows]
    for name in found[0]:
        lines.append([name, *(f"{one[name]:,.0f}" if one[name] else "-" for one in found)])
    return lines


def _many_requests(row: Any) -> dict[str, float]:
    parts = {
        name: sum(
            one["own_us"]
            for one in row["kernels"]
            if any(fnmatch(one["name"], kernel) for kernel in kernels)
        )
        for name, kernels in _MANY_REQUESTS.items()
    }
    rest = row["us"] - row["gap_us"] - sum(parts.values())
    return parts | {"the rest": rest, "gaps": row["gap_us"], "the step": row["us"]}


_ONE_REQUEST = {
    "q, k and v": ("few_rows#4",),
    "attention and rotation": ("paged_attention", "combine#1"),
    "output": ("few_rows#1",),
    "router": ("one_row#1",),
    "gate and up of 8 experts": ("few_rows#2",),
    "down of 8 experts": ("few_rows#3",),
}
"""Kernels of a layer in order."""


@table("step-experts-fp8", "h200-step-experts-fp8.json")
def step_experts_fp8(data: Any) -> Cells:
    return _layer(data["row"], data["layers"], _ONE_REQUEST)


_GPT_OSS = {
    "q, k and v": ("product#2",),
    "attention and rotation": ("one_query",),
    "output": ("product#1",),
    "router, experts chosen": ("route#1",),
    "pairs listed": ("list_pairs#1",),
    "gate and up of experts": ("few#1",),
    "down of experts": ("few#2",),
    "experts summed": ("combine#1",),
}


@table("step-gpt-oss", "h200-step-gpt-oss.json")
def step_gpt_oss(data: Any) -> Cells:
    (row,) = data["rows"]
    return _layer(row, data["layers"], _GPT_OSS)


@table("step-gpt-oss-turns", "h200-step-gpt-oss-turns.json")
def step_gpt_oss_turns(data: Any) -> Cells:
    """Returns how much longer a layer takes with each change, in every run."""
    runs = [
        {change: statistics.mean(us) / data["layers"] for change, us in run["us"].items()}
        for run in data["runs"]
    ]
    lines = [["us a layer more", *(f"{run['requests']} requests" for run in data["runs"])]]
    for change in dict.fromkeys(name for run in runs for name in run if name != "as before"):
        more = (f"{r[change] - r['as before']:+.1f}" if change in r else "-" for r in runs)
        lines.append([change, *more])
    return lines


def _layer(row: Any, layers: int, parts: Mapping[str, tuple[str, ...]]) -> Cells:
    """Returns a layer's parts: their time, what they read, and the time that reading takes at least."""
    lines = [["part", "us a layer", "MB", "us at the bandwidth"]]
    kernels = {one["name"]: one for one in row["steps"]["kernels"]}
    for part, names in parts.items():
        us = sum(kernels[name]["own_us"] for name in names) / layers
        size = sum(kernels[name]["bytes"] or 0 for name in names)
        read = (f"{size / 1e6:.1f}", f"{size / row['tb_s'] / 1e6:.1f}") if size else ("-", "-")
        lines.append([part, f"{us:.1f}", *read])
    return lines


def _experts(steps: Any) -> dict[str, float]:
    """Returns microseconds of each part of a step; they add up to the step."""
    found = {
        name: sum(one["own_us"] for one in steps["kernels"] if one["name"].startswith(starts))
        for name, starts in _EXPERTS.items()
    }
    rest = steps["us"] - steps["gap_us"] - sum(found.values())
    return found | {"the rest": rest, "gaps": steps["gap_us"], "the step": steps["us"]}
