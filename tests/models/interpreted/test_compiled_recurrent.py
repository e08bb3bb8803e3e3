"""Kernels of recurrent layers compile for an H200: the interpreter runs types that do not fit, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.compile_environment import compile_environment

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches compile them there")
ROOT = Path(__file__).parents[3]


def test_they_compile_and_fit_into_shared_memory(tmp_path: Path) -> None:
    environment = compile_environment(tmp_path)
    command = [sys.executable, "-m", "tests.models.interpreted.compiled_recurrent"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    found = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"_conv_step", "_conv_prompts", "_keep_last", "_delta_step", "_mamba_step"} < found
    assert {"_over_chunks", "_delta_layer", "_delta_tiles", "_within_chunks"} < found
    assert {"_mamba_layer", "_mamba_finish", "_short_conv"} < found
