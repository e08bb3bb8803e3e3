"""`kvant bench ..`: measurements of speed that need nothing but Kvant."""

from __future__ import annotations

from typing import ClassVar

import typer

from kvant.cli import bench_attention, bench_serve, bench_startup, bench_throughput
from kvant.cli.foreign_flags import Foreign
from kvant.cli.measuring import MeasuringCommand


class BenchCommand(MeasuringCommand):
    """A command of `kvant bench`. Recorded command lines have --format for --kv-format."""

    group = "bench "
    foreign: ClassVar = {"--format": Foreign(takes_value=True, becomes=("--kv-format",))}


app = typer.Typer(
    name="bench",
    help="Measure speed: attention, servers, start-up and throughput.",
    no_args_is_help=True,
)
app.command("attention", cls=BenchCommand)(bench_attention.attention)
app.command("serve", cls=BenchCommand)(bench_serve.serve)
app.command("startup", cls=BenchCommand)(bench_startup.startup)
app.command("throughput", cls=BenchCommand)(bench_throughput.throughput)
