"""Products with narrow weights compile for GPUs and fit into their shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compile_environment import compile_environment

pytest.importorskip("triton", reason="triton is not installed here")

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="launches compile them there")
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    environment = compile_environment(tmp_path)
    command = [sys.executable, "-m", "tests.weights.interpreted.compiled", str(capability)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = {line.split()[0] for line in done.stdout.splitlines()}
    rounding = {"round_row", "round_by", "round_groups", "product_of_blocks"}
    assert found == (rounding if capability >= 89 else set()) | {
        "product", "vector", "decode_tile", "block_product", "block_vector", "decode_blocks",
    }  # fmt: skip
