"""Products with narrow weights on one GPU: their errors, and the fastest cut for every shape.

python -m benchmarks.weight_products [--out FILE] [--seconds N]

For each shape of Qwen3-8B, each format and several numbers of rows it measures every cut, checks the
fastest against a float64 product of the decoded bytes, and prints GB/s of narrow bytes beside cuBLAS
in bfloat16 and `torch._scaled_mm`. Weights rotate, so that no cache holds them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvant.measure.gpu_time import captured, replay_us
from kvant.weights.codecs import NarrowWeight, decode, encode
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8_CHANNEL,
    WHOLE,
    WeightFormat,
    int4_groups,
)
from kvant.weights.triton.product import Stripe, Tiles, decoded, one, tiled

SHAPES = {
    "qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288),
}  # fmt: skip
FORMATS = {
    "fp8": FP8_CHANNEL, "fp8 block": FP8_BLOCK, "int4 128": int4_groups(128), "int8": INT8_CHANNEL,
}  # fmt: skip
CHECKED = {
    **FORMATS, "int4 128 z": int4_groups(128, zero_points=True), "int4 32": int4_groups(32),
}  # fmt: skip
ROWS = (1, 16, 32, 64, 128, 256, 512)
_CACHE_BYTES = 200 << 20
Cut = Tiles | Stripe


def cuts(fmt: WeightFormat, rows: int, shape: tuple[int, int]) -> Iterator[Cut]:
    """Every cut that is tried."""
    if rows == 1:
        for n, block, warps in (
            (1, 4096, 4), (2, 2048, 4), (2, 4096, 8), (4, 1024, 4), (4, 2048, 8), (8, 1024, 8),
            (1, 2048, 2), (2, 1024, 2),
        ):  # fmt: skip
            yield Stripe(n, block, warps)
    tokens = max(16, min(rows, 128))
    splits = (1, 2, 4, 8) if rows <= 64 else (1, 2, 4)
    for n, depth, stages, warps in _blocks(fmt, rows):
        programs = -(-shape[0] // n) * -(-rows // tokens)
        for split in splits:
            steps = shape[1] // depth
            if steps % split or (split > 1 and programs * split > 132 * 8):
                continue
            yield Tiles(tokens, n, depth, split, stages, warps)


def _blocks(fmt: WeightFormat, rows: int) -> Sequence[tuple[int, int, int, int]]:
    """(rows, depth, stages, warps)."""
    deep = fmt.columns == WHOLE
    if rows <= 64:
        found = [
            (64, 128, 4, 4),
            (64, 128, 6, 4),
            (64, 128, 6, 2),
            (32, 128, 6, 2),
            (128, 128, 5, 8),
        ]
        return [*found, (64, 256, 4, 4), (64, 64, 8, 4)] if deep else [*found, (128, 128, 4, 4)]
    return [(128, 128, 3, 8), (64, 128, 4, 4), (128, 64 if deep else 128, 4, 8), (128, 128, 3, 4)]


def multiply(x: Tensor, weight: NarrowWeight, cut: Cut) -> Tensor:
    if isinstance(cut, Stripe):
        return one(x, weight, None, cut)
    return tiled(x, weight, None, cut)


def microseconds(run: Callable[[int], object], copies: int) -> float:
    """The time of one run: the fastest of three replays over all copies."""
    turns = max(copies, 12)
    count = [0]

    def each() -> None:
        run(count[0] % copies)
        count[0] += 1

    graph = captured(each, turns)
    return min(replay_us(graph) for _ in range(3)) / turns


def _compile(task: tuple[str, int, tuple[Cut, ...]]) -> None:
    """Compile in a process of its own; Triton's cache on disk keeps it."""
    name, rows, found = task
    weight = encode(torch.randn(256, 8192, device="cuda"), CHECKED[name])
    x = torch.randn(rows, 8192, device="cuda").bfloat16()
    for cut in found:
        try:
            multiply(x, weight, cut)
        except Exception as fault:
            print("cannot compile", name, cut, type(fault).__name__, str(fault)[:100], flush=True)


def compile_all(processes: int) -> None:
    """Fill Triton's cache from several processes: one compiles some hundred kernels in minutes."""
    tasks = []
    for name, fmt in FORMATS.items():
        for rows in ROWS[:5]:
            unique: dict[tuple[Any, ...], Cut] = {}
            for shape in SHAPES.values():
                for cut in cuts(fmt, rows, shape):
                    key: tuple[Any, ...] = (cut.rows, cut.warps)
                    if isinstance(cut, Tiles):
                        key += (cut.depth, cut.stages, cut.split > 1)
                    else:
                        key += (cut.block,)
                    unique[key] = cut
            found = tuple(unique.values())
            tasks += [(name, rows, found[i : i + 4]) for i in range(0, len(found), 4)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        pool.map(_compile, tasks, chunksize=1)


def peers(shape: tuple[int, int], rows: int) -> dict[str, float]:
    """Microseconds of cuBLAS in bfloat16 and of torch's products of fp8."""
    n, columns = shape
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    copies = max(2, _CACHE_BYTES // (2 * n * columns))
    wide = [torch.randn(n, columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    found = {"bf16": microseconds(lambda i: torch.nn.functional.linear(x, wide[i]), copies)}
    eights = [w.to(torch.float8_e4m3fn) for w in wide]
    x8 = x.to(torch.float8_e4m3fn)
    single = torch.ones((), device="cuda")
    by_row, by_column = torch.ones(rows, 1, device="cuda"), torch.ones(1, n, device="cuda")
    scales = {"fp8 x fp8, tensor": (single, single), "fp8 x fp8, row": (by_row, by_column)}
    for name, (a, b) in scales.items():

        def run(i: int, a: Tensor = a, b: Tensor = b) -> Tensor:
            return torch._scaled_mm(x8, eights[i].t(), a, b, out_dtype=torch.bfloat16)

        try:
            found[name] = microseconds(run, copies)
        except RuntimeError as fault:
            print(name, "refused:", str(fault)[:80])
    return found


def measure(deadline: float) -> list[dict[str, Any]]:
    results = []
    for rows in (1, 32, 16, 64, 512, 128, 256):
        for label, shape in SHAPES.items():
            beside = peers(shape, rows)
            print(f"{label} {rows} rows:", {k: round(v, 1) for k, v in beside.items()}, flush=True)
            results.append({"shape": label, "rows": rows, "peers": beside})
            x = torch.randn(rows, shape[1], device="cuda").bfloat16()
            for name, fmt in FORMATS.items():
                if time.monotonic() > deadline or (name == "int8" and label != "gate_up"):
                    continue
                found = _fastest(name, fmt, shape, x)
                if found is not None:
                    results.append({"shape": label, "rows": rows, **found})
    return results


def _fastest(
    name: str, fmt: WeightFormat, shape: tuple[int, int], x: Tensor
) -> dict[str, Any] | None:
    """Time every cut of one product; print and return the fastest."""
    rows = len(x)
    weight = encode(torch.randn(*shape, device="cuda") * 0.02, fmt)
    copies = max(2, min(16, _CACHE_BYTES // weight.num_bytes))
    made = [weight] + [_copy(weight) for _ in range(copies - 1)]
    timed = []
    for cut in cuts(fmt, rows, shape):
        try:
            us = microseconds(partial(_one_of, x, made, cut), copies)
            timed.append((us, cut))
        except Exception as fault:
            print("failed", name, cut, type(fault).__name__, str(fault)[:120])
    if not timed:
        return None
    timed.sort(key=lambda pair: pair[0])
    us, best = timed[0]
    error, speed = relative_error(x, weight, best), weight.num_bytes / us / 1e3
    print(f"  {name:10} {us:7.1f} us {speed:6.0f} GB/s error {error:.1e} {best}", flush=True)
    for other_us, other in timed[1:4]:
        print(f"      {other_us:7.1f} {other}")
    found: dict[str, Any] = {
        "format": name,
        "us": us,
        "gb_s": speed,
        "error": error,
        "cut": str(best),
    }
    found["all"] = [(u, str(c)) for u, c in timed]
    if rows == 512:
        scratch = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        found["decode_us"] = microseconds(lambda i: decoded(made[i], scratch), copies)
        print(f"      decoding to bfloat16 alone {found['decode_us']:.1f} us")
    return found


def _one_of(x: Tensor, made: Sequence[NarrowWeight], cut: Cut, index: int) -> Tensor:
    return multiply(x, made[index], cut)


def _copy(weight: NarrowWeight) -> NarrowWeight:
    zeros = None if weight.zeros is None else weight.zeros.clone()
    return NarrowWeight(
        weight.format,
        weight.rows,
        weight.columns,
        weight.codes.clone(),
        weight.scales.clone(),
        zeros,
    )


def relative_error(x: Tensor, weight: NarrowWeight, cut: Cut) -> float:
    exact = x.double() @ decode(weight, torch.float64).T
    return float((multiply(x, weight, cut).double() - exact).norm() / exact.norm())


def check() -> list[dict[str, Any]]:
    """Every format at Qwen3-8B's shapes against float64, with one usual cut, and decoding bit by bit."""
    found = []
    for name, fmt in CHECKED.items():
        worst = 0.0
        for shape in ((6144, 4096), (4096, 12288)):
            weight = encode(torch.randn(*shape, device="cuda") * 0.02, fmt)
            out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            alike = torch.equal(decoded(weight, out), decode(weight, torch.bfloat16))
            for rows in (1, 2, 4, 8, 16, 32, 64, 128, 512):
                x = torch.randn(rows, shape[1], device="cuda").bfloat16()
                tokens = max(16, min(128, rows))
                cut = Tiles(tokens, 64 if rows <= 64 else 128, 128, 2, 3, 4 if rows <= 64 else 8)
                worst = max(worst, relative_error(x, weight, cut))
                if rows == 1:
                    worst = max(worst, relative_error(x, weight, Stripe(2, 1024, 4)))
            found.append({"format": name, "shape": shape, "decoding_exact": alike, "error": worst})
            print(
                f"check {name:12} {shape} decoding {'exact' if alike else 'DIFFERS'} {worst:.1e}",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--processes", type=int, default=12)
    given = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    if given.processes:
        compile_all(given.processes)
        print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "checks": check()}
    print(f"checked after {time.monotonic() - begin:.0f} s", flush=True)
    found["results"] = measure(begin + given.seconds)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1))
    print(f"done after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
