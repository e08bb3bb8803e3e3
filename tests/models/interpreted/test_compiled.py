"""The kernels of the decoder compile for an H200 and fit into its shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compile_environment import compile_environment

pytest.importorskip("triton", reason="triton is not installed here")

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches compile them there")
def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    environment = compile_environment(tmp_path)
    command = [sys.executable, "-m", "tests.models.interpreted.compiled"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    found = {line.split()[0] for line in done.stdout.splitlines()}
    assert found == {
        "route", "list_pairs", "count_pairs", "sum_counts", "place_pairs", "one_gate_up", "one_down",
        "few", "many", "list_blocks", "decode_tile", "gate_blocks", "down_blocks",
        "gate_rounded", "down_rounded", "product_of_blocks", "copied_product_of_blocks", "round_groups",
        "combine", "embed", "product", "ready_row", "one_row",
        "_add_norm", "_rotate", "rotate_latent", "_norm_whole", "_gate", "_gate_heads", "_sum_rows", "_added",
    }  # fmt: skip
