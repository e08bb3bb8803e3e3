"""`make kernels`: GPU kernels on a machine without a GPU, under Triton's interpreter.

Triton is installed beside the environment, not in it. It takes 280 MB of download and a gigabyte on disk, and
other tests must run without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRITON = "triton==3.9.*"  # older interpreters do not know numpy 2.4
BESIDE = ROOT / ".venv" / "kernels"
OLDEST = "triton==3.6.0"  # torch 2.11's; a kernel that newer versions compile may fail there
BESIDE_OLDEST = ROOT / ".venv" / "kernels-oldest"
# Compiling tests come first: each takes as long as fifty others.
TESTS = (
    "tests/engine/interpreted",
    "tests/models/interpreted",
    "tests/weights/interpreted",
    "tests/attention/triton",
)


def fetch() -> None:
    for beside, version in ((BESIDE, TRITON), (BESIDE_OLDEST, OLDEST)):
        if not list(beside.glob("triton-*.dist-info")):
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-compile",
                "--no-deps",
                "--target",
            ]
            subprocess.run([*pip, str(beside), version], check=True)


def main() -> int:
    fetch()
    if sys.argv[1:] == ["--fetch"]:  # both versions of Triton, and no test
        return 0
    workers = str(max(1, os.cpu_count() or 1))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(BESIDE), os.environ.get("PYTHONPATH", "")]),
        "TRITON_INTERPRET": "1",
        "KVANT_TEST_OLDEST_TRITON": str(BESIDE_OLDEST),
    }
    spread = ("--workers", workers, "--spread", "test")
    command = [sys.executable, "-m", "pytest", *spread, *(sys.argv[1:] or TESTS)]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
