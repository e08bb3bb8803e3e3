"""`python -m benchmarks.cpu`: speed of this machine's CPU, attention alone and whole steps beside peers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json
from kvant.errors import BadValue, UnknownName, WayOut


def cpu(
    out: OutFile = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads; torch's number if not given.")
    ] = None,
    attention: Annotated[
        bool, typer.Option(help="Measure attention alone, in every format.")
    ] = True,
    reference: Annotated[
        bool, typer.Option(help="Measure the reference backend too, which is slow.")
    ] = True,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers",
            metavar="P,..",
            help="Measure whole steps too, beside transformers and llama-cpp; none for Kvant alone.",
            show_default=False,
        ),
    ] = None,
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="With --peers: float32-weights, int8-weights, int4-weights, q8_0-weights, q4_0-weights, "
            "long-context, experts-100m, hybrid-100m; may be repeated, all without.",
            show_default=False,
        ),
    ] = None,
    llama_cpp_python: Annotated[
        Path,
        typer.Option(
            "--llama-cpp-python", metavar="PYTHON", help="Interpreter that has llama-cpp-python."
        ),
    ] = Path(sys.executable),
) -> None:
    """Time attention in every KV format beside the read bandwidth of memory, and with --peers whole
    steps of the demo model beside other engines.
    """
    from kvant.engine.process import wait_without_spinning

    if parts and peers is None:
        raise BadValue(
            f"--part {parts[0]} measures nothing without --peers",
            why="parts are those of whole steps",
            ways_out=(
                WayOut("measure Kvant's steps alone", ("--peers", "none")),
                WayOut("measure them beside another engine", ("--peers", "transformers")),
            ),
        )
    wait_without_spinning()
    import torch

    from benchmarks.cpu_attention import bench
    from benchmarks.cpu_peers import Part, Peer, Peers, measure_part, table
    from kvant.measure.facts import command_line, measurement_facts

    if threads is not None:
        torch.set_num_threads(threads)
    names = [] if peers in (None, "none") else str(peers).split(",")
    wanted = frozenset(_one_of(Peer, name, "peer", "--peers") for name in names)
    chosen = [_one_of(Part, name, "part", "--part") for name in parts or ()] or list(Part)
    found = bench(reference=reference) if attention else {}
    versions: dict[str, str] = {}
    if peers is not None:
        rows = []
        who = Peers(wanted, torch.get_num_threads(), llama_cpp_python)
        for part in chosen:
            more, seen = measure_part(part, who)
            rows += more
            versions |= seen
        sys.stdout.write(table(rows) + "\n")
        found["steps"] = [asdict(row) for row in rows]
    if out is not None:
        command = command_line("python -m benchmarks.cpu")
        facts = measurement_facts(command, ("torch", "transformers", "numba"))
        facts |= {"threads": torch.get_num_threads(), **versions, **found}
        write_json(out, facts)


_Named = TypeVar("_Named", bound=Enum)


def _one_of(kind: type[_Named], name: str, what: str, flag: str) -> _Named:
    known = {member.value: member for member in kind}
    if name not in known:
        raise UnknownName(what, name, known, asked_by=flag)
    return known[name]


if __name__ == "__main__":
    run_command(cpu)
