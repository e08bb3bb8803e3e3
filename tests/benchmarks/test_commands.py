"""Benchmarks as commands: their options and errors are those of `kvant`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.command import ROOT, benchmark

COMMANDS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if "run_command(" in path.read_text()
)
COMMANDS.remove("command")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_checks_its_out_file_first(name: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "out.json"
    ran = benchmark(name, "--out", missing)
    assert ran.returncode == 2
    assert ran.stderr.startswith("kvant: error:")
    assert str(missing.parent) in ran.stderr


def test_every_benchmark_is_listed() -> None:
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    assert {"attention", "decode", "scheduler"} < set(COMMANDS)
    for name in COMMANDS:
        assert f"| `{name}` |" in listed


def test_parts_of_steps_are_refused_if_no_steps_are_measured() -> None:
    ran = benchmark("cpu", "--no-attention", "--part", "int8-weights")
    assert ran.returncode == 2
    assert "--peers none" in ran.stderr
