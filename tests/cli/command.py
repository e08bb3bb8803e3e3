"""Runs `kvant` as a user does: a process of its own, with what it cost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_MEASURED = """
import resource, sys
sys.argv[0] = "kvant"
code = 0
try:
    from kvant.cli.main import run
    run()
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else int(bool(end.code))
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss: a child starts with its parent's, and a test process is large.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
heavy = [name for name in ("torch", "transformers") if name in sys.modules]
sys.stdout.flush()
sys.stderr.write(f"\\x00{used.ru_utime + used.ru_stime} {peak} {','.join(heavy)}")
sys.stderr.flush()
sys.exit(code)
"""


@dataclass(frozen=True)
class Ran:
    """cpu_s: processor seconds, which other processes do not change. peak_mib: resident memory.

    heavy: which of torch and transformers were imported.
    """

    code: int
    out: str
    err: str
    cpu_s: float
    peak_mib: float
    heavy: tuple[str, ...]


def kvant(*arguments: str | Path, env: dict[str, str] | None = None) -> Ran:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100"} | (env or {}),
        timeout=120,
    )
    err, _, figures = done.stderr.partition("\x00")
    assert figures, f"the command ended without its figures: {done.stderr}"
    cpu, peak, *heavy = figures.split()
    names = tuple(heavy[0].split(",")) if heavy else ()
    return Ran(done.returncode, done.stdout, err, float(cpu), int(peak) / 1024, names)
