"""`kvant bench invariance`: what --batch-invariant gives and what it costs."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.engine.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from kvant.engine.llm import LLM
    from kvant.kv.names import FormatRequest
    from kvant.measure.invariance import Flips, Speed


class Measured(Enum):
    ALL = "all"
    FLIPS = "flips"
    COST = "cost"


def invariance(
    model: Annotated[
        str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2.")
    ] = DEFAULT_MODEL,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="KV cache format; may be repeated, every one without.",
            show_default=False,
        ),
    ] = None,
    what: Annotated[
        Measured, typer.Option("--what", help="flips, cost (tokens/s), or all.")
    ] = Measured.ALL,
    tokens: Annotated[
        int, typer.Option("--tokens", min=8, help="Positions of the text that are compared.")
    ] = 256,
    attention_backend: Annotated[
        str, typer.Option("--attention-backend", metavar="B", help="auto, or one by name.")
    ] = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="File for the result as JSON.")] = None,
) -> None:
    """How often a format's likeliest token flips between batch shapes, and what --batch-invariant costs."""
    from rich.console import Console

    from kvant.engine.llm import LLM
    from kvant.kv.dtype import KVDtype
    from kvant.kv.names import FormatRequest, known_names, parse_format

    wanted = (
        [FormatRequest(d, d) for d in KVDtype if d.format.name in known_names()]
        if not formats
        else [parse_format(name, asked_by="--format") for name in formats]
    )
    console = Console()
    flips: list[Flips] = []
    speeds: list[Speed] = []
    for mode in (False, True):
        llm = LLM(
            model,
            dtype="float32",
            kv_cache_dtype="float32",
            kv_cache_memory="32MiB",
            max_model_len=256,
            max_num_seqs=1,
            attention_backend=attention_backend,
            batch_invariant=mode,
        )
        if what is not Measured.COST:
            flips += _flips(llm, wanted, tokens)
        if what is not Measured.FLIPS:
            speeds += _speeds(llm, wanted)
    _print(flips, speeds, console)
    if out is not None:
        import torch

        from kvant.measure.facts import measurement_facts

        command = shlex.join(["kvant", *sys.argv[1:]])
        found = {
            **measurement_facts(command, ["torch", "transformers", "numba"]),
            "model": model,
            "threads": torch.get_num_threads(),
            "flips": [dataclasses.asdict(row) for row in flips],
            "decode": [dataclasses.asdict(row) for row in speeds],
        }
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _flips(llm: LLM, wanted: Sequence[FormatRequest], tokens: int) -> list[Flips]:
    from kvant.measure.fidelity import passage
    from kvant.measure.invariance import count_flips

    text = llm.encode(passage())[:tokens]
    return [count_flips(llm, one, text) for one in wanted]


def _speeds(llm: LLM, wanted: Sequence[FormatRequest]) -> list[Speed]:
    from kvant.measure.invariance import ROWS, decode_speed

    return [decode_speed(llm, one, batch, 24) for one in wanted for batch in (1, ROWS)]


def _print(flips: list[Flips], speeds: list[Speed], console: Console) -> None:
    from rich.table import Table

    if flips:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("KV format", "backend", "mode", "flips", "of", "largest change of a logit"):
            table.add_column(title, justify="left" if title in ("KV format", "mode") else "right")
        for row in flips:
            mode = "on" if row.batch_invariant else "off"
            table.add_row(
                row.format, row.backend, mode, str(row.flips), str(row.positions), f"{row.most:.2g}"
            )
        console.print(table)
    if speeds:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("KV format", "backend", "mode", "batch", "tokens/s"):
            table.add_column(title, justify="left" if title in ("KV format", "mode") else "right")
        for speed in speeds:
            mode = "on" if speed.batch_invariant else "off"
            rate = f"{speed.tokens_per_second:.1f}"
            table.add_row(speed.format, speed.backend, mode, str(speed.batch), rate)
        console.print(table)
