"""`python -m benchmarks.invariance`: gain and cost of --batch-invariant."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json
from kvant.plan.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from benchmarks.answers import Agreement, Answers, Way
    from benchmarks.flips import Flips, Speed
    from kvant.engine.llm import LLM
    from kvant.kv.names import FormatRequest


class Measured(Enum):
    BOTH = "both"
    FLIPS = "flips"
    COST = "cost"
    ANSWERS = "answers"


class Mode(Enum):
    BOTH = "both"
    OFF = "off"
    ON = "on"


def invariance(
    model: Annotated[
        str, typer.Argument(help="Directory, hub id, .gguf file, or smollm2.")
    ] = DEFAULT_MODEL,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-format",
            help="KV cache format; may be repeated, every one without.",
            show_default=False,
        ),
    ] = None,
    what: Annotated[
        Measured,
        typer.Option(
            "--what", help="flips, cost (tokens/s), both of these, or whole answers compared."
        ),
    ] = Measured.BOTH,
    mode: Annotated[
        Mode, typer.Option("--mode", help="Which modes of --batch-invariant to run.")
    ] = Mode.BOTH,
    dtype: Annotated[str, typer.Option("--dtype", metavar="D")] = "float32",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    way: Annotated[
        list[str] | None,
        typer.Option(
            "--way",
            help="How to answer: alone, batch, unrecorded; may be repeated, default all.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="JSON of other answers, from another device.")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=8, help="Positions of the text that are compared.")
    ] = 256,
    attention_backend: Annotated[
        str, typer.Option("--attention-backend", metavar="B", help="auto, or one by name.")
    ] = "auto",
    out: OutFile = None,
) -> None:
    """How often a format's likeliest token flips between batch shapes, and what --batch-invariant costs."""
    from rich.console import Console

    from benchmarks.answers import compare_all, parse_way, read_answers
    from kvant.engine.llm import LLM
    from kvant.kv.dtype import KVDtype
    from kvant.kv.names import FormatRequest, known_names, parse_format

    ways = [parse_way(name) for name in way or ()]
    others = () if against is None else read_answers(against)
    wanted = (
        [FormatRequest(d, d) for d in KVDtype if d.format.name in known_names()]
        if not formats
        else [parse_format(name, asked_by="--kv-format") for name in formats]
    )
    console = Console()
    flips: list[Flips] = []
    speeds: list[Speed] = []
    answers: list[Answers] = []
    for is_on in {Mode.BOTH: (False, True), Mode.OFF: (False,), Mode.ON: (True,)}[mode]:
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            kv_cache_dtype="model",
            kv_cache_memory="32MiB",
            max_model_len=256,
            max_num_seqs=1,
            attention_backend=attention_backend,
            batch_invariant=is_on,
        )
        if what in (Measured.FLIPS, Measured.BOTH):
            flips += _flips(llm, wanted, tokens)
        if what in (Measured.COST, Measured.BOTH):
            speeds += _speeds(llm, wanted)
        if what is Measured.ANSWERS:
            answers += _answers(llm, wanted, ways)
    compared = list(compare_all(answers, others))
    _print(flips, speeds, console)
    _print_answers(compared, console)
    if out is not None:
        import torch

        from kvant.measure.facts import command_line, measurement_facts

        command = command_line("python -m benchmarks.invariance")
        found = {
            **measurement_facts(command, ["torch", "transformers", "numba"]),
            "model": model,
            "threads": torch.get_num_threads(),
        }
        if what is Measured.ANSWERS:
            found["answers"] = [dataclasses.asdict(row) for row in answers]
            found["agreements"] = [dataclasses.asdict(row) for row in compared]
        else:
            found["flips"] = [dataclasses.asdict(row) for row in flips]
            found["decode"] = [dataclasses.asdict(row) for row in speeds]
        write_json(out, found)


def _flips(llm: LLM, wanted: Sequence[FormatRequest], tokens: int) -> list[Flips]:
    from benchmarks.flips import count_flips
    from kvant.measure.fidelity import passage

    text = llm.encode(passage())[:tokens]
    return [count_flips(llm, one, text) for one in wanted]


def _speeds(llm: LLM, wanted: Sequence[FormatRequest]) -> list[Speed]:
    from benchmarks.flips import ROWS, decode_speed

    return [decode_speed(llm, one, batch, 24) for one in wanted for batch in (1, ROWS)]


def _answers(llm: LLM, wanted: Sequence[FormatRequest], ways: Sequence[Way]) -> list[Answers]:
    from benchmarks.answers import answer, ways_on

    chosen = ways or ways_on(llm.engine.runner.device)
    return [found for one in wanted for found in answer(llm, one, chosen)]


def _print_answers(rows: Sequence[Agreement], console: Console) -> None:
    from rich.table import Table

    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("KV format", "dtype", "mode", "way", "beside", "flips", "of"):
        table.add_column(title, justify="right" if title in ("flips", "of") else "left")
    for row in rows:
        mode = "on" if row.batch_invariant else "off"
        table.add_row(
            row.format, row.dtype, mode, row.way, row.beside, str(row.flips), str(row.positions)
        )
    console.print(table)


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


if __name__ == "__main__":
    run_command(invariance)
