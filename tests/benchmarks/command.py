"""Runs a benchmark as `python -m benchmarks.NAME` in the repository's root, in a process that has torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import forked

ROOT = Path(__file__).resolve().parents[2]


def benchmark(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return forked.run(
        ["-m", f"benchmarks.{name}", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100"},
    )
