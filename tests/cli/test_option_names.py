"""One name, one meaning, in every command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from kvant.cli.main import app
from kvant.errors import UnknownName


def options(command: Any, path: str = "kvant") -> Iterator[tuple[str, str]]:
    """Each option as it is written, with its command."""
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, f"{path} {name}")
    for parameter in command.params:
        if parameter.param_type_name == "option":
            for option in parameter.opts:
                yield option, path


def test_format_is_how_a_command_prints_and_kv_format_what_a_benchmark_stores() -> None:
    found: dict[str, set[str]] = {}
    for option, path in options(typer.main.get_command(app)):
        found.setdefault(option, set()).add(path)
    printing = {
        "kvant calibrate",
        "kvant eval",
        "kvant tune",
        "kvant generate",
        "kvant plan",
        "kvant verify",
    }
    assert found["--format"] == printing
    measuring = ("kvant bench ", "kvant eval", "kvant tune")
    assert all(path.startswith(measuring) for path in found["--kv-format"])
    assert not found["--kv-format"] & found["--kv-cache-dtype"], "two flags for one thing"


@pytest.mark.parametrize("written", ["--kv-format", "--format"])
def test_recorded_command_lines_of_benchmarks_still_run(written: str) -> None:
    with pytest.raises(UnknownName, match="--kv-format"):
        CliRunner().invoke(
            app,
            ["bench", "throughput", written, "fp9"],
            catch_exceptions=False,
            standalone_mode=False,
        )
