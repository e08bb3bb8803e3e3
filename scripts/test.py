"""`make test`: the fast suite on all cores, then the table of founding bugs and acceptance cases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    # One more than cores: tests of servers and of processes often wait.
    workers = str(1 + (os.cpu_count() or 1))
    # One thread a process: workers that each start a thread per core only wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "--acceptance", "--workers", workers]
    return subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
