"""`kvant bench startup`: measures the time from the start of a process to the first token."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from kvant.cli.output import OutFile, write_json
from kvant.cli.progress import tracked

CHAT = (sys.executable, "-c", "from kvant.cli.main import run; run()", "chat")
PARTS = (sys.executable, "-m", "kvant.cli.startup_parts")


def startup(
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Starts after the first.")] = 3,
    first: Annotated[
        bool,
        typer.Option(
            help="Begin in an empty cache: the model is converted and kernels compiled, 600 MB of disk."
        ),
    ] = True,
    out: OutFile = None,
) -> None:
    """Measure the time until the first token of `kvant chat`.

    It runs the demo model, and shows the parts of the time.
    """
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.startup import measure_starts, table

    starts = []
    measured = measure_starts(CHAT, PARTS, repeats, first=first)
    for start in tracked(measured, repeats + first, "measuring", "starts"):
        starts.append(start)
        sys.stderr.write(f"{start.cache} cache: {start.seconds:.2f} s\n")
    sys.stdout.write(table(starts) + "\n")
    if out is not None:
        packages = ("torch", "transformers", "numba")
        facts = measurement_facts(command_line("kvant"), packages)
        facts["starts"] = [asdict(start) for start in starts]
        write_json(out, facts)
