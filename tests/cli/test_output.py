"""A file that could not be written is refused before a command works for minutes to fill it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvant.cli.main import app
from kvant.errors import BadValue
from tests.cli.command import in_turn

BENCHES = re.findall(
    r"^  (\w+) ",
    CliRunner().invoke(app, ["bench", "--help"]).output.partition("Commands:")[2],
    re.M,
)


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
