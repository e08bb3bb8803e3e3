"""`python -m benchmarks.moe`: layers of experts on a GPU, in parts, and torch's grouped product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json
from kvant.measure.facts import command_line, measurement_facts


@dataclass(frozen=True, slots=True)
class Shape:
    """experts: their number, and per token; width of the model and of an expert; number of timed layers."""

    experts: int
    top_k: int
    hidden: int
    width: int
    layers: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, 6),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336, 2),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, 4),
}
_TOKENS = (1, 2, 4, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192)


def moe(
    shape: Annotated[str, typer.Option("--shape", help="One of " + ", ".join(SHAPES) + ".")] = (
        "qwen3-30b-a3b"
    ),
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", help="Tokens of a step; may be repeated.")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Time other tiles too.")] = False,
    out: OutFile = None,
) -> None:
    """Microseconds of one layer of experts with random weights and a random choice, in CUDA graphs.

    Several layers take turns, so that no weight is read from the L2 cache. TB/s counts the weights of the
    experts that are used; beside it TFLOP/s of both products. The error is relative, over some rows.
    """
    run = _Bench(SHAPES[shape])
    print(f"{shape}: {run.device_name}")
    print("tokens path        route  sort+gate_up+down+sum     all   TB/s  TFLOP/s    error  torch")
    rows = [row for count in tokens or _TOKENS for row in run.rows(count, sweep=sweep)]
    if out is not None:
        facts = measurement_facts(command_line("python -m benchmarks.moe"), ["torch", "triton"])
        write_json(out, {**facts, "shape": shape, "rows": rows})


class _Bench:
    def __init__(self, shape: Shape) -> None:
        import torch

        from kvant.models.fused.experts import Experts
        from kvant.models.fused.routing import Routing
        from kvant.models.fused.triton_experts import TritonExperts

        torch.manual_seed(0)
        self.shape = shape
        self.device = torch.device("cuda")
        self.device_name = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        self.kernels = TritonExperts(self.device)
        routing = Routing(shape.experts, shape.top_k, rounded=True)

        def made(*sizes: int) -> Any:
            return torch.empty(sizes, dtype=torch.bfloat16, device=self.device).normal_(0, 0.02)

        self.layers = [
            Experts(
                routing, (made(shape.experts, shape.hidden), None),
                (made(shape.experts, 2 * shape.width, shape.hidden), None),
                (made(shape.experts, shape.hidden, shape.width), None),
            )
            for _ in range(shape.layers)
        ]  # fmt: skip

    def time(self, run: Callable[[int], object]) -> float:
        """Returns microseconds of run(layer), over all layers in turn."""
        from kvant.measure.gpu_time import captured, replay_us

        turn = cycle(range(len(self.layers)))
        inner = 2 * len(self.layers)
        graph = captured(lambda: run(next(turn)), inner)
        return median(replay_us(graph) / inner for _ in range(5))

    def rows(self, tokens: int, *, sweep: bool) -> list[dict[str, Any]]:
        """Times every kernel for this number of tokens, and prints a line for each."""
        import torch

        from kvant.models.fused.triton_experts import MOST_FEW

        shape, kernels = self.shape, self.kernels
        x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, device=self.device)
        logits = [
            torch.randn(tokens, shape.experts, dtype=torch.bfloat16, device=self.device)
            for _ in self.layers
        ]
        layers = self.layers
        choices = [
            kernels.route(one, layer.routing)[0] for one, layer in zip(logits, layers, strict=True)
        ]
        used = sum(len(set(choice.ids.flatten().tolist())) for choice in choices) / len(choices)
        weight_bytes = used * 3 * shape.hidden * shape.width * 2
        flops = 6 * tokens * shape.top_k * shape.hidden * shape.width

        route = self.time(lambda i: kernels.route(logits[i], layers[i].routing))
        try:
            torch_us = self.time(lambda i: self._torch(x, choices[i], layers[i]))
        except RuntimeError as fault:  # shapes or a version that it does not take
            print(f"torch's grouped product: {str(fault)[:100]}")
            torch_us = float("nan")

        def single(i: int, **tiles: Any) -> Any:
            h = kernels.one_gate_up(x, choices[i], layers[i], tiles.get("up"))
            return kernels.one_down(h, choices[i], layers[i], tile=tiles.get("down"))

        def few(i: int, tiles: Any = None) -> Any:
            return kernels.combine(kernels.few(x, choices[i], layers[i], tiles), x)

        def many(i: int, tiles: Any = None) -> Any:
            return kernels.combine(kernels.many(x, choices[i], layers[i], tiles), x)

        paths: dict[str, Callable[[int], Any]] = {}
        if tokens <= 8:
            paths["single"] = single
        if tokens <= 2 * MOST_FEW:
            paths["few"] = few
        if tokens >= 64:
            paths["many"] = many
        if sweep:
            paths |= self._tiles(tokens, single, few, many)
        expected, picked = self._expected(x, choices[0], layers[0])
        found_rows: list[dict[str, Any]] = []
        for name, path in paths.items():
            try:
                found = path(0)[picked].double()
                error = float((found - expected).norm() / expected.norm())
                us = self.time(path)
            except Exception as fault:  # a tile that the device does not take
                print(f"{tokens:6} {name:26} {type(fault).__name__}: {str(fault)[:90]}")
                continue
            print(
                f"{tokens:6} {name:26} {route:6.1f} {us:8.1f} {route + us:8.1f} "
                f"{weight_bytes / us / 1e6:6.2f} {flops / us / 1e6:8.0f} {error:9.1e} {torch_us:8.1f}",
                flush=True,
            )
            found_rows.append(
                {"tokens": tokens, "path": name, "route_us": route, "us": us, "torch_us": torch_us,
                 "used_bytes": weight_bytes, "flops": flops, "error": error}
            )  # fmt: skip
        return found_rows

    def _tiles(
        self, tokens: int, single: Any, few: Any, many: Any
    ) -> dict[str, Callable[[int], Any]]:
        from kvant.models.fused.triton_experts import FewTile, ManyTile, OneTile

        found: dict[str, Callable[[int], Any]] = {}
        if tokens <= 2:
            for one in (
                OneTile(1, 2048), OneTile(2, 1024), OneTile(4, 512), OneTile(4, 1024, 8),
                OneTile(2, 256), OneTile(4, 256, 8), OneTile(8, 256), OneTile(8, 128),
            ):  # fmt: skip
                name = f"{one.rows}x{one.block} w{one.warps}"
                found[f"up {name}"] = partial(single, up=one)
                found[f"down {name}"] = partial(single, down=one)
        if 2 <= tokens <= 512:
            for pairs in (16, 32, 64) if tokens >= 64 else (16,):
                for rows, depth, stages, warps in (
                    (64, 128, 3, 4), (64, 128, 5, 4), (64, 256, 3, 4), (128, 64, 4, 4),
                    (128, 128, 3, 4), (128, 128, 3, 8),
                ):  # fmt: skip
                    tile = FewTile(pairs, rows, depth, stages, warps)
                    name = f"few {pairs} {rows}x{depth} s{stages} w{warps}"
                    found[name] = partial(few, tiles=(tile, tile))
        if tokens >= 256:
            for many_tile in (
                ManyTile(64, 128, 64, 3, 4), ManyTile(64, 64, 64, 4, 4), ManyTile(64, 128, 64, 4, 8),
                ManyTile(128, 64, 64, 4, 4), ManyTile(128, 64, 64, 4, 8), ManyTile(128, 128, 64, 3, 8),
                ManyTile(128, 128, 64, 4, 8), ManyTile(128, 128, 32, 4, 8),
            ):  # fmt: skip
                one_name = f"{many_tile.pairs}x{many_tile.rows}x{many_tile.depth}"
                name = f"many {one_name} s{many_tile.stages} w{many_tile.warps}"
                found[name] = partial(many, tiles=(many_tile, many_tile))
            for copied in _copied_tiles(tokens):
                sides = (
                    f"{one.rows}x{one.depth} s{one.stages} w{one.warps} p{one.programs}"
                    for one in (copied.up, copied.down)
                )
                found[f"copied {copied.pairs} {', '.join(sides)}"] = partial(many, tiles=copied)
        return found

    def _torch(self, x: Any, choice: Any, layer: Any) -> Any:
        """Computes both products with torch's grouped product, including sort, activation and sum."""
        import torch
        from torch.nn import functional as F

        grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm
        ids, order = torch.sort(choice.ids.flatten(), stable=True)
        bounds = torch.arange(1, self.shape.experts + 1, dtype=ids.dtype, device=ids.device)
        offs = torch.searchsorted(ids, bounds).to(torch.int32)
        h = grouped(x[order // self.shape.top_k], layer.gate_up[0].transpose(-2, -1), offs=offs)
        gate, up = h.chunk(2, dim=-1)
        y = grouped(F.silu(gate) * up, layer.down[0].transpose(-2, -1), offs=offs)
        y = y * choice.weights.flatten()[order, None].to(y.dtype)
        parts = torch.empty_like(y).index_copy_(0, order, y)
        return parts.view(len(x), self.shape.top_k, -1).sum(1)

    def _expected(self, x: Any, choice: Any, layer: Any) -> tuple[Any, list[int]]:
        """Computes the definition in float64 for some rows."""
        import torch
        from torch.nn import functional as F

        rows = sorted({0, len(x) // 3, len(x) // 2, len(x) - 1})
        found: list[Any] = []
        for row in rows:
            total: Any = 0
            for expert, weight in zip(
                choice.ids[row].tolist(), choice.weights[row].tolist(), strict=True
            ):
                gate, up = (layer.gate_up[0][expert].double() @ x[row].double()).chunk(2)
                total = total + weight * (layer.down[0][expert].double() @ (F.silu(gate) * up))
            found.append(total)
        return torch.stack(found), rows


def _copied_tiles(tokens: int) -> list[Any]:
    """Returns tiles of weights that the tensor memory accelerator copies."""
    from kvant.models.fused.resident_experts import CopiedTile, CopiedTiles

    if tokens >= 2048:
        return [
            CopiedTiles(
                128, CopiedTile(128, stages=up, programs=programs), CopiedTile(256, stages=down)
            )
            for up, down, programs in ((3, 3, 0), (4, 4, 0), (3, 3, 1))
        ]
    two = CopiedTile(128, stages=4, warps=4, programs=2)
    return [
        CopiedTiles(64, replace(two, programs=1), two),
        CopiedTiles(64, replace(two, programs=1, warps=8), replace(two, depth=128, stages=2)),
        CopiedTiles(64, replace(two, rows=64), replace(two, rows=256, warps=8, programs=1)),
    ]


if __name__ == "__main__":
    run_command(moe)
