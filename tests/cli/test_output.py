"""A file that could not be written is refused before a command works for minutes to fill it."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvant.cli.main import app
from kvant.cli.output import figure_table
from kvant.errors import BadValue
from tests.cli.command import in_turn

BENCHES = re.findall(
    r"^  (\w+) ",
    CliRunner().invoke(app, ["bench", "--help"]).output.partition("Commands:")[2],
    re.M,
)


def test_a_narrow_terminal_folds_names_and_keeps_figures_whole() -> None:
    table = figure_table("stored as", ("B/token", "bits", "mean KL", "99 %", "same top"))
    figures = ("6,480", "4.50", "0.02636±0.00083", "0.1855", "91.5%")
    table.add_row("int4_feedback/int4_per_token_head", *figures)
    console = Console(width=64, file=io.StringIO(), record=True)
    console.print(table)
    shown = console.export_text()
    assert "…" not in shown
    assert all(figure in shown for figure in figures)
    assert "int4" in shown


@pytest.mark.parametrize("bench", BENCHES)
def test_every_benchmark_looks_at_its_out_file_first(bench: str, tmp_path: Path) -> None:
    server = ["http://127.0.0.1:1"] if bench == "serve" else []
    missing = tmp_path / "missing" / "out.json"
    result = CliRunner().invoke(app, ["bench", bench, *server, "--out", str(missing)])
    assert isinstance(result.exception, BadValue)
    assert str(missing.parent) in result.exception.why


def test_so_does_every_other_command_with_a_file(tmp_path: Path) -> None:
    commands = (("demo", "--out"), ("verify", "--record"), ("plan", "smollm2", "--plot"))
    found = in_turn([((*arguments, tmp_path), {}) for arguments in commands])
    for arguments, ran in zip(commands, found, strict=True):
        assert ran.code == 2, arguments
        assert f"{arguments[-1]} {tmp_path} cannot be written" in ran.err
        assert "it is a directory" in ran.err
        assert ran.heavy == [], arguments
