"""Time of one layer's decode attention with and without wide rows, of sequences of equal lengths.

    python -m benchmarks.wide_decode --shape 64x8192 --out wide-decode.json

32 query heads, 8 KV heads of 128, bfloat16, pages of 16 in any order. All formats of a shape are measured in
turn, over four layers each, in captured graphs; figures are medians.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer

from benchmarks.command import run_command
from kvant.attention.base import Step, with_groups
from kvant.cli.output import OutFile, write_json
from kvant.kv.dtype import KVDtype
from kvant.kv.pool import LayerCache
from kvant.kv.spec import WideRows
from kvant.measure.attention_inputs import Case, Inputs, make_cache, make_inputs
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.gpu_time import captured, replay_us

SINK, RECENT = 16, 144
LAYERS = 4
SHAPES = ("64x8192", "64x1024", "1x8192")
NARROW = {
    "bf16": (KVDtype.BFLOAT16, KVDtype.BFLOAT16),
    "int4": (KVDtype.INT4_PER_TOKEN_HEAD, KVDtype.INT4_PER_TOKEN_HEAD),
    "s4": (KVDtype.INT4_SHORT, KVDtype.INT4_SHORT),
    "s4n2": (KVDtype.INT4_SHORT, KVDtype.NORMAL2),
    "n2": (KVDtype.NORMAL2, KVDtype.NORMAL2),
    "k3v3": (KVDtype.TURBOQUANT_K3, KVDtype.TURBOQUANT_V3),
}
WIDE = {"bf16": KVDtype.BFLOAT16, "i8": KVDtype.INT8_PER_TOKEN_HEAD}
FORMATS = (
    "bf16", "int4", "int4+bf16", "int4+i8", "s4", "s4+bf16", "s4+i8", "s4n2", "s4n2+bf16", "s4n2+i8", "n2",
    "n2+bf16", "k3v3", "k3v3+bf16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of sequences, and stored tokens of each."""

    seqs: int
    tokens: int

    def __str__(self) -> str:
        return f"B{self.seqs} L{self.tokens} n1"


def wide_decode(
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="F[+WIDE]", help="Short names.")
    ] = None,
    shapes: Annotated[list[str] | None, typer.Option("--shape", metavar="SEQSxTOKENS")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 15,
    out: OutFile = None,
) -> None:
    """Measure decode attention with wide rows."""
    rows: dict[str, dict[str, float]] = {}
    for text in shapes or SHAPES:
        shape = Shape(*(int(part) for part in text.split("x")))
        found = {
            name: statistics.median(us)
            for name, us in measure(shape, formats or FORMATS, rounds).items()
        }
        for name, us in found.items():
            rows[f"{name} {shape}"] = {
                "us": round(us, 1),
                "of_bf16": round(us / found["bf16"], 3),
            }
            print(f"{name} {shape}", rows[f"{name} {shape}"], flush=True)
    if out is not None:
        facts = measurement_facts(command_line("python -m benchmarks.wide_decode"), ["torch"])
        described = (
            "32 query heads, 8 KV heads of 128, bfloat16, pages of 16 in any order, 4 layers in "
            f"turn; first {SINK} and last {RECENT} rows wide"
        )
        write_json(out, {"schema": 1, "shape": described, "rows": rows, **facts})


def measure(
    shape: Shape, formats: tuple[str, ...] | list[str], rounds: int
) -> dict[str, list[float]]:
    """Returns microseconds of one layer, by format: `rounds` figures each, all formats in turn."""
    graphs = {name: capture(inputs(shape, name)) for name in dict.fromkeys(("bf16", *formats))}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            found[name].append(replay_us(graph) / LAYERS)
    return found


def capture(layers: list[Inputs]) -> torch.cuda.CUDAGraph:
    """Returns a graph of one call per layer."""
    from kvant.attention.triton.backend import TritonBackend

    backend = TritonBackend()

    def run() -> None:
        for x in layers:
            backend.attend(x.cache, x.q, x.step, x.params)

    return captured(run, 1)


def inputs(shape: Shape, name: str, device: str = "cuda") -> list[Inputs]:
    """Returns inputs of LAYERS layers in the format `name`, such as "int4+bf16"."""
    narrow, _, wide = name.partition("+")
    k, v = NARROW[narrow]
    case = Case(k, v, (shape.tokens,) * shape.seqs)
    made = [make_inputs(case, torch.device(device), seed=i) for i in range(LAYERS)]
    return [_with_wide_rows(x, shape, WIDE[wide]) for x in made] if wide else made


def _with_wide_rows(x: Inputs, shape: Shape, dtype: KVDtype) -> Inputs:
    """Returns the inputs with pages for the first and the latest rows of each sequence."""
    page = x.cache.page_size
    columns = [
        *range(-(-SINK // page)),
        *range((shape.tokens - RECENT) // page, -(-shape.tokens // page)),
    ]
    columns = list(dict.fromkeys(columns))
    pages = shape.seqs * len(columns)
    stored = make_cache(Case(dtype, dtype, (shape.tokens,)), pages, x.q.device)
    order = torch.randperm(pages, device=x.q.device).to(torch.int32)
    table = torch.zeros_like(x.step.page_table)
    table[:, columns] = order.view(shape.seqs, len(columns))
    return replace(x, cache=_beside(x.cache, stored), step=_two_tables(x.step, table))


def _beside(narrow: LayerCache, wide: LayerCache) -> LayerCache:
    assert wide.spec.k is not None
    assert wide.spec.v is not None
    rows = WideRows(wide.spec.k, wide.spec.v, SINK, RECENT)
    return replace(narrow, spec=replace(narrow.spec, wide=rows), wide=wide, wide_group=1)


def _two_tables(step: Step, table: torch.Tensor) -> Step:
    return with_groups(step, [(table, step.slot_mapping)])


if __name__ == "__main__":
    run_command(wide_decode)
