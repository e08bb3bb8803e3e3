"""`kvant bench ..`: measurements of speed that need nothing but Kvant."""

from __future__ import annotations

import typer

from kvant.cli import bench_attention, bench_serve, bench_startup, bench_throughput
from kvant.cli.measuring import MeasuringCommand


def _today(name: str) -> str:
    """Maps an old option name to its current name, since recorded command lines have --format."""
    return "kv-format" if name == "format" else name


app = typer.Typer(
    name="bench",
    help="Measure speed: attention, servers, start-up and throughput.",
    no_args_is_help=True,
    context_settings={"token_normalize_func": _today},
)
app.command("attention", cls=MeasuringCommand)(bench_attention.attention)
app.command("serve")(bench_serve.serve)
app.command("startup")(bench_startup.startup)
app.command("throughput", cls=MeasuringCommand)(bench_throughput.throughput)
