"""`python -m benchmarks.step_kernels`: which kernels a step's time goes to, from torch's profiler.

A kernel may start before the previous one has ended, so the lengths of kernels add up to more than the step.
Here a kernel counts from the end of all work before it to its own end. These times and the gaps, in which
nothing ran, add up to the whole.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from benchmarks.command import run_command
from kvant.cli.configured import configured
from kvant.cli.output import OutFile, write_json
from kvant.plan.config import EngineOptions, engine_config
from kvant.plan.settings import Settings

_MARKS = "rotate_and_store", "one_query"
"""Kernels that every layer launches: one of them, or the second right behind the first."""

_PRODUCTS = "output", "gate_up", "down", "qkv"
"""A layer's products in the order in which they follow one of `_MARKS`."""

_OF_HEADS = "few_rows", "wide_rows", "shared_rows", "product"
"""Kernels of layers' products, which may multiply by the head too."""

_UNCOUNTED = "Mem", "elementwise", "vectorized", "unrolled"
"""Beginnings of names of copies, fills and torch's own kernels."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Work on the device. begin, end: microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Share:
    """A kernel's part of a step. name: with its place behind its layer's mark.

    launches: per step. own_us: per step, from the end of all earlier work to the kernel's end. gap_us: per
    step, in which nothing ran before it. length_us: median length of one launch. early_us: median time for
    which a launch ran beside earlier work.
    """

    name: str
    launches: float
    own_us: float
    gap_us: float
    length_us: float
    early_us: float


def short_name(name: str) -> str:
    """Returns a kernel's name without its return type, namespaces, template arguments and parameters."""
    plain = re.sub(r"\(anonymous namespace\)::", "", name.removeprefix("void "))
    return re.split(r"[<(]", plain)[0].rsplit("::", 1)[-1] or name


def placed(pieces: Iterable[Piece]) -> list[Piece]:
    """Returns pieces in order of their begins, each name followed by "#" and how often it ran since a mark.

    A mark is a launch of `_MARKS`. Copies and fills keep their names. Where one of `_OF_HEADS` runs once more
    than in most layers, say five times, the head is the fourth, behind the last layer: it gets "#head", and
    the fifth "#4".
    """
    order = sorted(pieces, key=lambda piece: (piece.begin, piece.end))
    behind: list[dict[str, list[int]]] = [defaultdict(list)]
    for place, piece in enumerate(order):
        name = short_name(piece.name)
        if name in _MARKS:
            behind.append(defaultdict(list))
        behind[-1][name].append(place)
    counts = {name: [len(ran[name]) for ran in behind[1:] if name in ran] for name in _OF_HEADS}
    usual = {name: statistics.mode(found) for name, found in counts.items() if found}
    for launches in behind:
        for name, places in launches.items():
            plain = name in _MARKS or name.startswith(_UNCOUNTED)
            labels = [str(count + 1) for count in range(len(places))]
            if usual.get(name) == len(places) - 1:
                labels[-2:] = ["head", labels[-2]]
            for place, label in zip(places, labels, strict=True):
                order[place] = replace(order[place], name=name if plain else f"{name}#{label}")
    return order


def shares(pieces: Sequence[Piece], steps: int) -> list[Share]:
    """Divides the time from the first begin to the last end among kernels.

    pieces: in order of their begins, of `steps` steps. The longest share comes first.
    """
    own, gaps = defaultdict[str, float](float), defaultdict[str, float](float)
    lengths, early = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    covered: float | None = None
    for piece in pieces:
        covered = piece.begin if covered is None else covered
        gaps[piece.name] += max(0.0, piece.begin - covered)
        early[piece.name].append(max(0.0, min(covered, piece.end) - piece.begin))
        own[piece.name] += max(0.0, piece.end - max(covered, piece.begin))
        lengths[piece.name].append(piece.end - piece.begin)
        covered = max(covered, piece.end)
    found = [
        Share(
            name, len(lengths[name]) / steps, own[name] / steps, gaps[name] / steps,
            statistics.median(lengths[name]), statistics.median(early[name]),
        )
        for name in lengths
    ]  # fmt: skip
    return sorted(found, key=lambda share: -share.own_us - share.gap_us)


def products_of(names: Iterable[str]) -> dict[str, str]:
    """Returns which product of a dense layer each placed name is, for kernels that run once for each."""
    places = defaultdict[str, set[str]](set)
    for name in names:
        kernel, _, place = name.partition("#")
        places[kernel].add(place)
    whole = {"1", "2", "3", "4"}
    made = {
        f"{kernel}#{place}": product
        for kernel, found in places.items()
        if found - {"head"} == whole
        for place, product in enumerate(_PRODUCTS, start=1)
    }
    return made | {f"{kernel}#head": "head" for kernel in places if "head" in places[kernel]}


def table(found: dict[str, Any]) -> str:
    """Formats one load's steps as Markdown; GB/s for kernels whose bytes are known."""
    steps = found["steps"]
    lines = [
        f"{found['load']}, {steps['kind']}: {steps['us']:.0f} us a step, {steps['gap_us']:.0f} us of them "
        f"gaps; {found['tok_s']:.0f} tok/s without the profiler",
        "| kernel | launches | us a step | gap | length | early | GB/s | of the bandwidth |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for one in steps["kernels"][:24]:
        speed = "-" if one["gb_s"] is None else f"{one['gb_s']:.0f}"
        share = "-" if one["of_bandwidth"] is None else f"{one['of_bandwidth']:.0%}"
        lines.append(
            f"| {one['name']}{' ' + one['product'] if one['product'] else ''} | {one['launches']:.1f} "
            f"| {one['own_us']:.1f} | {one['gap_us']:.1f} | {one['length_us']:.1f} | {one['early_us']:.1f} "
            f"| {speed} | {share} |"
        )
    return "\n".join(lines)


def measure(
    llm: Any, loads: Sequence[Any], profiled: int, bandwidth: float
) -> Iterable[dict[str, Any]]:
    """Measures loads on one engine, and profiles `profiled` of their decode steps.

    Where prompts take many steps, it also profiles as many of those, once half of the sequences decode.
    bandwidth: TB/s. Raises RuntimeError if the profiler saw nothing.
    """
    from kvant.measure.throughput import GREEDY, decode_limit, run_load

    (params,) = GREEDY.values()
    for load in loads:
        run_load(llm, replace(load, requests=min(load.requests, 8), output=4), params, seed=0)
        repeats = 1 if load.requests > 64 else 2
        runs = [run_load(llm, load, params, seed=repeat + 1) for repeat in range(repeats)]
        seconds = [run[0] for run in runs]
        facts = {
            "load": str(load), "seconds": seconds, "num_steps": runs[-1][1],
            "tok_s": load.requests * load.output / min(seconds),
            "limit_tok_s": decode_limit(llm, load, bandwidth * 1e12), "tb_s": bandwidth,
        }  # fmt: skip
        for steps in _profiled(llm, load, params, profiled, bandwidth):
            yield {**facts, "steps": steps}


def _profiled(
    llm: Any, load: Any, params: Any, count: int, bandwidth: float
) -> Iterable[dict[str, Any]]:
    import random

    engine, numbers = llm.engine, random.Random(9)
    asked = replace(params, max_tokens=load.output, ignore_eos=True)
    waiting = {
        engine.submit([numbers.randrange(engine.vocab_size) for _ in range(load.input)], asked)
        for _ in range(load.requests)
    }
    started = set(waiting)
    per_step = engine.limits.max_num_batched_tokens
    if load.requests * load.input > 4 * count * per_step:
        while len(waiting) > load.requests // 2:
            waiting -= {piece.number for piece in engine.step()}

        def step() -> None:
            waiting.difference_update(piece.number for piece in engine.step())

        yield _record(llm, load, step, "prompts and decodes", count, bandwidth)
    while waiting:
        waiting -= {piece.number for piece in engine.step()}
    for _ in range(min(64, load.output // 4)):
        engine.step()
    yield _record(llm, load, engine.step, "decodes", count, bandwidth)
    for number in started:
        engine.cancel(number)
    while engine.has_work:
        engine.step()


def _record(
    llm: Any, load: Any, step: Any, kind: str, count: int, bandwidth: float
) -> dict[str, Any]:
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    from benchmarks.device_idle import WARM_UP_STEPS, NotProfiled, recorded

    before, length = llm.engine.stats.num_computed_tokens, load.input + load.output // 4
    found = recorded(llm.engine.runner.device, step, count)
    if isinstance(found, NotProfiled):
        raise RuntimeError(found.why)
    events, wall_ms = found
    tokens = (llm.engine.stats.num_computed_tokens - before) / (count + WARM_UP_STEPS)
    pieces = [
        Piece(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]
    if not pieces:
        raise RuntimeError("torch's profiler saw nothing run on the GPU")
    kernels = []
    known = bytes_of(llm, load.requests if kind == "decodes" else None, length)
    divided = shares(placed(pieces), count)
    products = products_of(share.name for share in divided)
    for share in divided:
        product = products.get(share.name)
        read = known.get(product or share.name.partition("#")[0])
        speed = of_all = None
        if read is not None:
            speed = read * share.launches / (share.own_us + share.gap_us) / 1e3
            of_all = speed / 1e3 / bandwidth
        kernels.append(
            {
                **asdict(share),
                "product": product,
                "bytes": read,
                "gb_s": speed,
                "of_bandwidth": of_all,
            }
        )
    span = max(piece.end for piece in pieces) - min(piece.begin for piece in pieces)
    return {
        "kind": kind, "count": count, "tokens": tokens, "wall_us": 1000 * wall_ms / count,
        "us": span / count, "gap_us": sum(one["gap_us"] for one in kernels), "kernels": kernels,
        "one_layer": one_layer(pieces),
    }  # fmt: skip


def one_layer(pieces: Sequence[Piece]) -> list[tuple[str, float, float]]:
    """Returns name, begin and end of every launch of one layer, in microseconds since its first mark ended.

    The layer is the one in the middle; its list ends with the next layer's first mark.
    """
    order = placed(pieces)
    is_mark = [piece.name in _MARKS for piece in order]
    marks = [
        place
        for place in range(len(order))
        if is_mark[place] and not (place and is_mark[place - 1])
    ]
    if len(marks) < 2:
        return []
    first, last = marks[len(marks) // 2 - 1], marks[len(marks) // 2]
    zero = order[first].end
    return [(one.name, one.begin - zero, one.end - zero) for one in order[first : last + 1]]


def bytes_of(llm: Any, sequences: int | None, length: int) -> dict[str, int]:
    """Returns the bytes that one launch reads, by product or kernel name.

    sequences: of `length` tokens each, in a decode step; None leaves attention out.
    """
    from kvant.models.quantization import format_of
    from kvant.models.weights import list_weights

    parts = {
        "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "output", "gate_proj": "gate_up",
        "up_proj": "gate_up", "down_proj": "down",
    }  # fmt: skip
    found = defaultdict[str, int](int)
    target, asked = llm.planned.target, llm.planned.request.quantization
    for weight in list_weights(target.config, target.geometry):
        layer, _, part = weight.name.rpartition(".")
        if asked is not None and weight.name == "lm_head":
            fmt = format_of(asked, weight.columns, is_head=True)
            found["head"] = fmt.matrix_bytes(weight.rows, weight.columns)
        if asked is not None and ".layers.0." in f"{layer}." and part in parts:
            fmt = format_of(asked, weight.columns)
            found[parts[part]] += fmt.matrix_bytes(weight.rows, weight.columns)
    if sequences is not None:
        layers = len(llm.planned.target.geometry.layers)
        read = sequences * length * llm.plan.bytes_per_token // layers
        found["paged_attention"] = found["one_query"] = read
    return dict(found)


@configured(EngineOptions, model="--model -m", without=("enable_prefix_caching", "seed"))
def step_kernels(
    settings: Settings,
    load: Annotated[
        list[str] | None,
        typer.Option("--load", metavar="REQUESTSxINPUT/OUTPUT", help="May be repeated."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps under the profiler.")] = 16,
    out: OutFile = None,
) -> None:
    """Divide the time of an engine's steps among kernels and gaps, beside its speed without the profiler."""
    import torch

    from kvant.engine.llm import LLM
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.read_bandwidth import read_bandwidth
    from kvant.measure.throughput import free_memory, parse_load

    loads = [parse_load(text) for text in load or ["1x128/256"]]
    config = engine_config(settings)
    config = replace(config, plan=replace(config.plan, prefix_caching=False), seed=0)
    bandwidth = read_bandwidth(torch.device("cuda"))
    free_memory()
    rows = []
    for found in measure(LLM.from_config(config), loads, steps, bandwidth):
        rows.append(found)
        sys.stdout.write(table(found) + "\n\n")
        sys.stdout.flush()
        if out is not None:
            facts = measurement_facts(
                command_line("python -m benchmarks.step_kernels"), ["torch", "transformers"]
            )
            write_json(out, {**facts, "rows": rows})


if __name__ == "__main__":
    run_command(step_kernels)
