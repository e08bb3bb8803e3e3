"""`make transfer`: pages that move between engines over NIXL, in one process and in several.

NIXL is installed beside the environment, not in it. It takes 70 MB of download, and other tests must run
without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
BESIDE = ROOT / ".venv" / "transfer"


def fetch() -> None:
    if not list(BESIDE.glob("nixl-*.dist-info")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(BESIDE), *NIXL], check=True)


def main() -> int:
    fetch()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(BESIDE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-m", "", *(sys.argv[1:] or ["tests/kv/transfer"])]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
