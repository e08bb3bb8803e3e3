"""Products with narrow weights on one GPU: their errors, and the fastest cut for every shape.

python -m benchmarks.weight_products [--out FILE] [--seconds N] [--rows 1,32]

For each shape of Qwen3-8B, each format and several numbers of rows it measures every cut, checks the
fastest against a float64 product of the decoded bytes, and prints GB/s of narrow bytes, next to cuBLAS
in bfloat16 and `torch._scaled_mm`. Weights rotate, so that no cache holds them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvant.measure.gpu_time import captured, replay_us
from kvant.weights.choose import multiply as chosen
from kvant.weights.codecs import NarrowWeight, decode, encode
from kvant.weights.cuda import few_rows, shared_rows, wide_rows
from kvant.weights.cuda.few_rows import Warps
from kvant.weights.cuda.shared_rows import Shares
from kvant.weights.format import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8_CHANNEL,
    WeightFormat,
    int4_groups,
)
from kvant.weights.triton.product import Tiles, decoded, tiled

SHAPES = {
    "gate_up": (24576, 4096), "down": (4096, 12288), "qkv": (6144, 4096), "output": (4096, 4096),
}  # fmt: skip
FORMATS = {"fp8": FP8_CHANNEL, "int4": int4_groups(128), "fp8 block": FP8_BLOCK}
CHECKED = {
    **FORMATS, "int8": INT8_CHANNEL, "int4 z": int4_groups(128, zero_points=True),
}  # fmt: skip
_CACHE_BYTES = 200 << 20
_SHARED, _RESERVED = 228 << 10, 1 << 10
"""Bytes of shared memory of a Hopper multiprocessor, and bytes that the system takes for each program."""
Cut = Tiles | Warps | Shares | wide_rows.Cut | None
"""A cut to measure; None for the engine's choice."""


def cuts(fmt: WeightFormat, rows: int, shape: tuple[int, int]) -> Iterator[Cut]:
    """Returns every cut to try: CUDA's for few rows if it serves the format, else Triton's."""
    yield None
    if rows <= few_rows.MOST_ROWS and few_rows.serves(fmt, *shape):
        if rows == 1:
            found = [(1, 8, 4), (1, 8, 2), (1, 4, 4), (1, 4, 8), (1, 16, 2), (2, 8, 2), (2, 4, 4)]
        else:
            found = [(1, 8, 3), (2, 8, 3), (4, 4, 2)]
            if wide_rows.reads(fmt, *shape, torch.bfloat16):
                yield from dict.fromkeys(wide_cuts(fmt, rows, shape))
                return
            kinds = (2, 4, 3), (2, 4, 4), (4, 4, 3), (2, 8, 3), (1, 8, 3)
            yield from dict.fromkeys(
                _shares(shape, *kind, n) for kind in kinds for n in (132, 264, 396)
            )
        yield from (Warps(*one) for one in found)
        return
    tokens = max(16, min(128, rows))
    for height, stages, warps in ((128, 3, 8), (64, 4, 4), (128, 4, 8)):
        for split in (1, 2):
            yield Tiles(tokens, height, 128, split, stages, warps)


def wide_cuts(fmt: WeightFormat, tokens: int, shape: tuple[int, int]) -> Iterator[wide_rows.Cut]:
    """Returns cuts of `wide_rows` that fit: 64 to 192 rows per program; parts fill an H200 once or twice."""
    rows, columns = shape
    tiles, depths = few_rows.token_tiles(tokens), (2, 4) if fmt.code.bits == 4 else (1, 2)
    for warps, resident in ((4, 2), (4, 1), (8, 1), (12, 1)):
        stripes = -(-rows // (16 * warps))
        for deep, stages, programs in product(depths, (2, 3), (132, 264)):
            parts = max(1, min(resident * programs // stripes, columns // (256 * deep)))
            cut = wide_rows.Cut(1, warps, stages, 4, parts, deep, resident)
            needed = wide_rows.shared_bytes(wide_rows.defines(fmt, tiles, torch.bfloat16, cut))
            if resident * (needed + _RESERVED) <= _SHARED:
                yield cut


def _shares(shape: tuple[int, int], tiles: int, warps: int, stages: int, programs: int) -> Shares:
    stripes = -(-shape[0] // (16 * tiles * warps))
    return Shares(tiles, warps, stages, max(1, min(round(programs / stripes), shape[1] // 256)))


def multiply(x: Tensor, weight: NarrowWeight, cut: Cut) -> Tensor:
    if cut is None:
        return chosen(x, weight, None)
    if isinstance(cut, Warps):
        return few_rows.multiply(x, weight, None, cut, few_rows.Kind(one=len(x) == 1))
    if isinstance(cut, wide_rows.Cut):
        return wide_rows.multiply(x, weight, None, cut).rows
    if isinstance(cut, Shares):
        return shared_rows.multiply(x, weight, None, cut)
    return tiled(x, weight, None, cut)


def microseconds(run: Callable[[int], object], copies: int) -> float:
    """Returns the time of one run: the fastest of three replays over all copies."""
    turns = max(copies, 12)
    count = [0]

    def each() -> None:
        run(count[0] % copies)
        count[0] += 1

    graph = captured(each, turns)
    return min(replay_us(graph) for _ in range(3)) / turns


def build_all(numbers: Sequence[int], threads: int) -> None:
    """Compiles CUDA kernels in threads, because no cache on disk keeps them."""
    tasks = {
        (fmt, shape[1], rows, cut)
        for fmt in FORMATS.values()
        for rows in numbers
        for shape in SHAPES.values()
        for cut in cuts(fmt, rows, shape)
        if isinstance(cut, Warps | Shares | wide_rows.Cut)
    }

    def make(task: tuple[WeightFormat, int, int, Warps | Shares | wide_rows.Cut]) -> None:
        torch.zeros(1, device="cuda")  # makes the context this thread's
        fmt, columns, rows, cut = task
        kind, tiles = few_rows.Kind(one=rows == 1), few_rows.token_tiles(rows)
        try:
            if isinstance(cut, wide_rows.Cut):
                wide_rows.kernel(fmt, tiles, torch.bfloat16, wide_rows.compiled_as(cut))
                return
            if isinstance(cut, Shares):
                parts = min(cut.parts, 2)
                cut = Shares(cut.tiles, cut.warps, cut.stages, parts)
                shared_rows.kernel(fmt, tiles, torch.bfloat16, cut, None, bias=False)
                return
            columns = columns if rows == 1 else 0
            few_rows.kernel(fmt, columns, tiles, torch.bfloat16, cut, kind, bias=False)
        except RuntimeError as fault:
            print("cannot build", task, str(fault)[:200], flush=True)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(make, tasks))


def peers(shape: tuple[int, int], rows: int) -> dict[str, float]:
    """Returns microseconds of cuBLAS in bfloat16 and of torch's products of fp8."""
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

        found[name] = microseconds(run, copies)
    return found


def measure(numbers: Sequence[int], deadline: float) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for rows in numbers:
        for label, shape in SHAPES.items():
            if time.monotonic() > deadline:
                print("time is up before", label, rows)
                return results
            beside = peers(shape, rows)
            print(f"{label} {rows} rows:", {k: round(v, 1) for k, v in beside.items()}, flush=True)
            results.append({"shape": label, "rows": rows, "peers": beside})
            x = torch.randn(rows, shape[1], device="cuda").bfloat16()
            for name, fmt in FORMATS.items():
                if time.monotonic() < deadline:
                    found = fastest(name, fmt, shape, x)
                    results.append({"shape": label, "rows": rows, **found})
    return results


def fastest(name: str, fmt: WeightFormat, shape: tuple[int, int], x: Tensor) -> dict[str, Any]:
    """Times every cut of one product; prints and returns the fastest, and the engine's choice."""
    weight = encode(torch.randn(*shape, device="cuda") * 0.02, fmt)
    copies = max(2, min(16, _CACHE_BYTES // weight.num_bytes))
    made = [weight] + [_copy(weight) for _ in range(copies - 1)]
    timed: list[tuple[float, Cut]] = []
    for cut in cuts(fmt, len(x), shape):
        try:
            timed.append((microseconds(partial(_one_of, x, made, cut), copies), cut))
        except Exception as fault:
            print("failed", name, cut, type(fault).__name__, str(fault)[:120])
    own = next((us for us, cut in timed if cut is None), 0.0)
    timed.sort(key=lambda pair: pair[0])
    us, best = timed[0]
    error, speed = relative_error(x, weight, best), weight.num_bytes / us / 1e3
    print(
        f"  {name:9} {us:6.1f} us {speed:5.0f} GB/s {error:.1e} {best}; chosen {own:.1f}",
        flush=True,
    )
    print("     ", "  ".join(f"{u:.1f} {_short(c)}" for u, c in timed[1:9]))
    found: dict[str, Any] = {"format": name, "us": us, "gb_s": speed, "error": error}
    found |= {"cut": str(best), "chosen_us": own, "all": [(u, str(c)) for u, c in timed]}
    if len(x) == 256:
        scratch = torch.empty(*shape, device="cuda", dtype=torch.bfloat16)
        found["decode_us"] = microseconds(lambda i: decoded(made[i], scratch), copies)
        print(f"      decoding to bfloat16 alone {found['decode_us']:.1f} us")
    return found


def _short(cut: Cut) -> str:
    if cut is None:
        return "chosen"
    if isinstance(cut, Warps):
        return f"({cut.tiles},{cut.warps},{cut.ahead})"
    if isinstance(cut, wide_rows.Cut):
        return f"<{cut.warps},{cut.stages},{cut.deep},{cut.resident}/{cut.parts}>"
    if isinstance(cut, Shares):
        return f"[{cut.tiles},{cut.warps},{cut.stages}/{cut.parts}]"
    return f"({cut.rows},{cut.stages},{cut.warps}/{cut.split})"


def _one_of(x: Tensor, made: Sequence[NarrowWeight], cut: Cut, index: int) -> Tensor:
    return multiply(x, made[index], cut)


def _copy(weight: NarrowWeight) -> NarrowWeight:
    zeros = None if weight.zeros is None else weight.zeros.clone()
    return NarrowWeight(
        weight.format, weight.rows, weight.columns, weight.codes.clone(), weight.scales.clone(), zeros
    )  # fmt: skip


def relative_error(x: Tensor, weight: NarrowWeight, cut: Cut) -> float:
    exact = x.double() @ decode(weight, torch.float64).T
    return float((multiply(x, weight, cut).double() - exact).norm() / exact.norm())


def check(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Checks every format against float64 with the engine's choice: a shape of Qwen3-8B, a ragged shape."""
    found = []
    for name, fmt in CHECKED.items():
        errors = {}
        for shape in ((4096, 12288), (1000, 512)):
            weight = encode(torch.randn(*shape, device="cuda") * 0.02, fmt)
            for rows in numbers:
                x = torch.randn(rows, shape[1], device="cuda").bfloat16()
                errors[f"{shape[0]}:{rows}"] = relative_error(x, weight, None)
        worst = max(errors.values())
        found.append({"format": name, "errors": errors})
        wrong = {k: f"{v:.1e}" for k, v in errors.items() if not v < 0.01}
        print(
            f"check {name:10} worst {worst:.1e} {'WRONG ' + str(wrong) if wrong else ''}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--rows", default="1,32,64,16,128,256")
    parser.add_argument("--checked", default="1,2,9,32,64,65")
    parser.add_argument("--threads", type=int, default=14)
    given = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    numbers = [int(n) for n in given.rows.split(",")]
    if few_rows.serves(FP8_CHANNEL, 4096, 4096):
        build_all(numbers, given.threads)
    print(f"built after {time.monotonic() - begin:.0f} s", flush=True)
    checks = check([int(n) for n in given.checked.split(",")])
    print(f"checked after {time.monotonic() - begin:.0f} s", flush=True)
    results = measure(numbers, begin + given.seconds)
    if given.out is not None:
        found = {"device": torch.cuda.get_device_name(), "checks": checks, "results": results}
        given.out.write_text(json.dumps(found, indent=1))
    print(f"done after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
