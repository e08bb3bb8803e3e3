"""`kvant bench attention`: decode attention alone on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.cli.output import OutFile, write_json
from kvant.cli.progress import tracked
from kvant.errors import BadValue, NotServable, WayOut
from kvant.kv.dtype import KVDtype

if TYPE_CHECKING:
    import torch

    from kvant.measure.attention_grid import Peer

_FORMATS = (KVDtype.BFLOAT16, KVDtype.FP8_E4M3)

Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-format",
        metavar="F",
        help="KV cache format; may be repeated. Default: bfloat16 and fp8_e4m3.",
    ),
]
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", metavar="INT", help="Sequences; 1, 2, .. 256 if not given."),
]
Lengths = Annotated[
    list[int] | None,
    typer.Option(
        "--length", metavar="INT", help="Tokens of each sequence; 1k, 2k, .. 128k if not given."
    ),
]
PageSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--page-size", "--block-size", metavar="INT", help="Tokens of a page; 16 if not given."
    ),
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Measurements of each case.")]


def attention(
    formats: Formats = None,
    batches: Batches = None,
    lengths: Lengths = None,
    page_sizes: PageSizes = None,
    repeats: Repeats = 5,
    out: OutFile = None,
) -> None:
    """Time one query per sequence, in batches of equal lengths. Cases that do not fit into memory are
    skipped.
    """
    run_grid("kvant", formats, batches, lengths, page_sizes, repeats, out)


def run_grid(
    command: str,
    formats: Sequence[str] | None,
    batches: Sequence[int] | None,
    lengths: Sequence[int] | None,
    page_sizes: Sequence[int] | None,
    repeats: int,
    out: Path | None,
    *,
    peers: Callable[[torch.device], Sequence[Peer]] = lambda _: (),
    peer_page_sizes: Sequence[int] | None = None,
) -> None:
    """Measures, prints a table and writes `out`. command: the program's name in the JSON's command line.

    peers: makes the other kernels to measure. peer_page_sizes: in tokens. Raises NotServable without a GPU,
    BadValue for lengths that are not a whole number of pages.
    """
    import torch

    if not torch.cuda.is_available():
        raise NotServable(
            "kvant bench attention needs a GPU",
            why="torch sees none here",
            ways_out=(
                WayOut("measure a whole model on this CPU", ("kvant", "bench", "throughput")),
            ),
        )

    from dataclasses import asdict

    from kvant.measure.attention_grid import BATCHES, LENGTHS, SMALL_PAGE, measure_grid, table
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.read_bandwidth import read_bandwidth

    device = torch.device("cuda")
    stored = [_parse(name) for name in formats or map(str, _FORMATS)]
    sizes, own_sizes = peer_page_sizes or [SMALL_PAGE], page_sizes or [SMALL_PAGE]
    largest = max(*sizes, *own_sizes)
    for n in lengths or ():
        if n < 1 or n % largest:
            raise BadValue(f"--length {n}", why=f"lengths are multiples of {largest} here")
    for n in (*sizes, *own_sizes):
        if n < 1 or n % SMALL_PAGE:
            raise BadValue(f"pages of {n} tokens", why=f"they are multiples of {SMALL_PAGE} here")
    beside = peers(device)
    bandwidth = read_bandwidth(device)
    sys.stderr.write(f"read bandwidth {bandwidth:.2f} TB/s\n")
    facts = measurement_facts(command_line(command), ["torch", "triton"])
    found = []
    shapes = batches or BATCHES, lengths or LENGTHS
    measured = measure_grid(
        stored, *shapes, beside, sizes, device, repeats=repeats, own_page_sizes=own_sizes
    )
    most = len(stored) * len(shapes[0]) * len(shapes[1])  # fewer may fit into memory
    most *= len(own_sizes) + len(beside) * len(sizes)
    for one in tracked(measured, most, "measuring", "rows"):
        found.append(one)
        if out is not None:  # written after every row, so that an interruption loses nothing
            document = {**facts, "read_tb_per_s": bandwidth, "rows": [asdict(r) for r in found]}
            write_json(out, document)
    sys.stdout.write(table(found) + "\n")


def _parse(name: str) -> KVDtype:
    from kvant.kv.names import parse_format

    wanted = parse_format(name, asked_by="--kv-format")
    if not isinstance(wanted.k, KVDtype) or wanted.k is not wanted.v:
        raise BadValue(f"--kv-format {name}", why="keys and values are of one format here")
    return wanted.k
