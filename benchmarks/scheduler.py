"""`python -m benchmarks.scheduler`: the cost of a step without the model, on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json

if TYPE_CHECKING:
    from benchmarks.scheduler_steps import Row

SIZES = (16, 64, 256, 1024)


def scheduler(
    sequences: Annotated[
        list[int] | None,
        typer.Option(
            "--sequences", min=1, help="Running sequences; may be repeated. Default: 16 to 1024."
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed.")] = 300,
    out: OutFile = None,
) -> None:
    """What a step costs beside the model: scheduling and batch building, decodes alone and mixed with
    prefills, and the engine's whole loop over a device that costs nothing.
    """
    from rich.console import Console
    from rich.table import Table

    from benchmarks.engine_loop import measure_whole
    from benchmarks.scheduler_steps import run
    from kvant.measure.facts import command_line, measurement_facts

    sizes = tuple(sequences or SIZES)
    rows: list[Row] = []
    with Console(stderr=True).status("measuring"):
        rows += run(sizes, steps)
        whole = [measure_whole(size, steps) for size in sizes]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("load", "sequences", "tokens", "schedule", "build", "advance", "step", "p99"):
        table.add_column(title, justify="left" if title == "load" else "right", no_wrap=True)
    for row in rows:
        parts = (row.schedule_us, row.build_us, row.advance_us, row.total_us, row.p99_us)
        figures = (f"{part / 1e3:.3f}" for part in parts)
        table.add_row(row.load, str(row.sequences), f"{row.tokens:.0f}", *figures)
    for one in whole:
        figures = (f"{part / 1e3:.3f}" for part in (one.median_us, one.p99_us))
        table.add_row("whole loop", str(one.sequences), str(one.sequences), "", "", "", *figures)
    console = Console()
    console.print(table)
    console.print(f"[dim]milliseconds a step, medians of {steps} steps; no model runs[/]")
    if out is not None:
        facts = measurement_facts(
            command_line("python -m benchmarks.scheduler"), ("torch", "numpy")
        )
        facts["rows"] = [asdict(row) for row in rows]
        facts["whole"] = [asdict(one) for one in whole]
        write_json(out, facts)


if __name__ == "__main__":
    run_command(scheduler)
