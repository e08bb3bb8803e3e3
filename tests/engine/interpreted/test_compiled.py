"""Kernels are compiled for an H200: what the interpreter runs may still have types that do not fit."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.compile_environment import compile_environment

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches compile them there")
ROOT = Path(__file__).parents[3]
MORE = [
    ("BFLOAT16", "FLOAT16"), ("FP8_E4M3", "FP8_E5M2"),
    ("FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD"), ("NVFP4", "INT4_PER_TOKEN_HEAD"),
    ("TURBOQUANT_K3", "TURBOQUANT_V3"), ("TURBOQUANT_K4", "TURBOQUANT_V4"),
]  # fmt: skip


def compiled(cache: Path, *names: str) -> Counter[str]:
    environment = compile_environment(cache)
    command = [sys.executable, "-m", "tests.engine.interpreted.compiled", *names]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    return Counter(done.stdout.split())


def test_what_a_gpu_draws_with_compiles(tmp_path: Path) -> None:
    """Logits in float32 and in float64; each search of a filter begins and goes on."""
    expected = {
        "survey": 2,
        "draw_few": 2,
        "_narrow": 8,
        "_weigh": 2,
        "_choose": 2,
        "_most_likely": 5,
        "_lay_out": 1,
        "_gather_pages": 1,
        "_write_pages": 1,
    }
    assert compiled(tmp_path) == {**expected, "clear_listed": 1, "clear_pages": 1, "copy_pages": 2}


def test_so_does_what_rounds_keys_with_matrices(tmp_path: Path) -> None:
    found = compiled(tmp_path, "INT4_SHORT_FEEDBACK", "INT4_SHORT")
    assert found["store_rows"] == 1
    assert found["rotate_and_store"] == 2, "with tiles of few rows and of many"


def test_so_does_what_reads_two_forms_of_a_row(tmp_path: Path) -> None:
    found = compiled(tmp_path, "INT4_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "BFLOAT16")
    assert found["store_rows"] == 2
    assert found["rotate_and_store"] == 4, "with tiles of few rows and of many"
    assert found["both_attention"] == found["combine_both"] == 2, "with attention sinks and without"
    assert found["paged_attention"] >= 5, "of prompts and batch-invariant steps, each form"


BESIDE_WIDE = [
    ("INT4_SHORT", "INT4_SHORT"), ("NORMAL2", "NORMAL2"), ("NVFP4", "NVFP4"), ("FP8_E4M3", "FP8_E4M3"),
    ("INT8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD"), ("TURBOQUANT_K4", "TURBOQUANT_V4"),
    ("INT4_FEEDBACK", "INT4_PER_TOKEN_HEAD"), ("INT4_SHORT_FEEDBACK", "NORMAL2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("k", "v", "wide", "head"),
    [
        ("INT4_SHORT", "NORMAL2", "BFLOAT16", "64"),
        *(
            pytest.param(k, v, wide, head, marks=pytest.mark.slow)
            for k, v in BESIDE_WIDE
            for wide in ("BFLOAT16", "INT8_PER_TOKEN_HEAD")
            for head in ("16", "64", "128")
        ),
    ],
)
def test_paddings_of_two_forms_may_differ(
    k: str, v: str, wide: str, head: str, tmp_path: Path
) -> None:
    found = compiled(tmp_path, k, v, wide, head)
    assert found["both_attention"] == found["combine_both"] == 2, "queries in bfloat16 and float32"


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("TURBOQUANT_K3", "NVFP4"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE),
    ],
)
def test_so_does_what_writes_and_reads_pages(k: str, v: str, tmp_path: Path) -> None:
    found = compiled(tmp_path, k, v)
    assert found["store_rows"] == 1
    assert found["rotate_and_store"] == 2, "with tiles of few rows and of many"
    programs = 8 if k == "BFLOAT16" else 5
    assert found["paged_attention"] >= programs, "with sinks, with a window, with neither, crowded"
    assert found["combine"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BFLOAT16", "FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD"])
def test_so_does_what_attends_to_latents(name: str, tmp_path: Path) -> None:
    assert compiled(tmp_path, name, name)["latent_attention"] == 2
