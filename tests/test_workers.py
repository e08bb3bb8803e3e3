"""Workers run every test once, and each failure is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIRST = """
import os
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_dies(): os._exit(3)
def test_after_one_that_died(): pass
def test_leaves(): pytest.exit("at once", 5)
def test_after_one_that_left(tmp_path): assert not list(tmp_path.iterdir())
"""
SECOND = """
import pytest

@pytest.fixture(scope="module")
def made():
    print("made once")
    yield
    assert False, "at the end"

@pytest.mark.parametrize("number", range(4))
def test_shares(made, number): pass
def test_captures(made, capfd):
    print("a line")
    assert capfd.readouterr().out == "a line\\n"
def test_is_skipped(): pytest.skip("a reason")
"""


@pytest.mark.parametrize("spread", ["file", "test"])
def test_every_test_runs_once_even_if_its_worker_ends(spread: str, tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    options = (
        "-p",
        "tests.workers",
        "--workers",
        "2",
        "--spread",
        spread,
        "-rA",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(tmp_path / "files"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = sorted(re.findall(r"^(PASSED|FAILED|ERROR) test_\w+.py::(test_\w+)", done.stdout, re.M))
    passed = ["after_one_that_died", "after_one_that_left", "captures", "passes", *["shares"] * 4]
    failed = ["dies", "fails", "leaves"]
    assert [name for state, name in found if state == "PASSED"] == [f"test_{n}" for n in passed]
    assert [name for state, name in found if state == "FAILED"] == [f"test_{n}" for n in failed]
    assert "exit code 3" in done.stdout
    assert "at once" in done.stdout
    assert "at the end" in done.stdout
    assert done.stdout.count("SKIPPED [1]") == 1
