"""Commands whose output is closed, left by its reader, or in an encoding without most characters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.models import config, write_model
from tests.cli.command import measured

RUN = "import sys; sys.argv[0] = 'kvant'; from kvant.cli.main import run; run()"


def without_reader(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The result of a Python process whose stdout is a pipe without a reader."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdout=write_end,
            stderr=subprocess.PIPE,
            env=buffered,
            text=True,
            timeout=60,
        )
    finally:
        os.close(write_end)


@pytest.mark.parametrize("arguments", [("--version",), ("plan",), ("plan", "--format", "json")])
def test_a_reader_who_leaves_is_no_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    model = [write_model(tmp_path / "m", config())] if "plan" in arguments else []
    ran = without_reader(RUN, *arguments, *model)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_a_command_found_is_its_exit_code_read_or_not() -> None:
    found = "from kvant.cli import main\ndef app(**_): print('a'); sys.exit(3)\nmain.app = app\n"
    ran = without_reader(f"import sys\n{found}\nmain.run()")
    assert (ran.returncode, ran.stderr) == (3, "")


def test_a_server_goes_on_if_its_output_is_not_read() -> None:
    """It says so again whenever its engine was restarted."""
    lines = "from kvant.cli.serve import _say\nfor word in ('ready', 'again'): _say(word)"
    ran = without_reader(lines)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_command_without_streams_does_its_work(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", config())
    kvant = [sys.executable, "-c", RUN, "plan", str(model)]
    ran = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *kvant], timeout=60)
    assert ran.returncode == 0


def test_characters_that_a_terminal_lacks_end_no_command(tmp_path: Path) -> None:
    ran = measured("plan", write_model(tmp_path / "m", config()), env={"PYTHONIOENCODING": "ascii"})
    assert (ran.code, ran.err) == (0, "")
    assert "stored as" in ran.out
