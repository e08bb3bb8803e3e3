"""Figures in README and docs are those of the committed JSON."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = [ROOT / "docs" / "reliability.md", *(ROOT / "docs" / "benchmarks").glob("*.md")]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.tables", "--check", "--root", str(root)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def test_every_table_is_what_its_json_gives() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_figure_changed_by_hand_is_found(copy: Path) -> None:
    page = copy / "docs" / "benchmarks" / "scheduler.md"
    text = page.read_text()
    row = next(line for line in text.splitlines() if line.startswith("| decode | 256"))
    page.write_text(text.replace(row, row.replace("0.", "0.0", 1)))
    done = check(copy)
    assert done.returncode == 1
    assert row in done.stdout


def test_new_json_makes_the_tables_stale(copy: Path) -> None:
    data = copy / "docs" / "benchmarks" / "scheduler.json"
    text = re.sub(r'"total_us": \d+', '"total_us": 9', data.read_text(), count=1)
    data.write_text(text)
    assert check(copy).returncode == 1


def test_a_worse_figure_turns_a_goal_into_a_miss_with_its_size(copy: Path) -> None:
    data = copy / "docs" / "benchmarks" / "h200-starts.json"
    found = json.loads(data.read_text())
    newest = [row for row in found["rows"] if row["start"] == "first"][-1]
    newest["seconds"] = 90
    data.write_text(json.dumps(found))
    command = [sys.executable, "-m", "benchmarks.tables", "--root", str(copy)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    goals = (copy / "docs" / "benchmarks" / "README.md").read_text()
    assert "| a server's first start | at most 60 s | 90.0 s | **missed by 50 %** |" in goals
    assert "a server's first start, by 50 %" in goals


@pytest.mark.parametrize("page", MEASURED, ids=lambda path: path.name)
def test_a_table_that_is_not_generated_says_why(page: Path) -> None:
    lines = page.read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.match(r"<!-- (table: \S+|by hand: .+) -->$", before), line
