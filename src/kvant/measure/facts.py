"""What belongs beside every measurement: where, when, with what it was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path


def measurement_facts(command: str, packages: Iterable[str]) -> dict[str, object]:
    """Date, command, commit, machine and versions, ready for JSON."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "commit": _commit(),
        "device": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Of the source that is running, with a plus where it differs; None outside a repository."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
