"""Answers to generated requests, valid and invalid, are as /openapi.json describes them.

`pytest tests/server/test_schemathesis.py -m slow -s` runs 500 examples an operation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import tiny_chat
from tests.server.harness import Server

pytest.importorskip("schemathesis")

MODEL_LEN = 64
ROOT = Path(__file__).resolve().parents[2]


def _judge(directory: Path, *flags: str) -> str:
    """All checks, positive and negative data, NUL bytes, ignored_auth; the judge's report."""
    model = tiny_chat.build(directory, fills=True, max_position_embeddings=MODEL_LEN)
    places = ("--max-num-seqs", "256", "--max-num-queued-reqs", "512")
    with Server(model, ("--api-key", "sesame", *places), key="sesame") as server:
        engine = server.engine_pid()
        command = (
            sys.executable, "-m", "schemathesis.cli", "run",
            f"http://127.0.0.1:{server.port}/openapi.json",
            "--checks", "all", "--exclude-checks", "positive_data_acceptance", "--mode", "all",
            "--generation-allow-x00", "true", "--header", "Authorization: Bearer sesame",
            "--continue-on-failure", "--no-color", "--seed", "3", "--request-timeout", "30",
            "--output-sanitize", "false", "--generation-database", "none", *flags,
        )  # fmt: skip
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        hooks = {"SCHEMATHESIS_HOOKS": "tests.server.schemathesis_hooks", "PYTHONPATH": path}
        done = subprocess.run(
            command, cwd=directory, env=os.environ | hooks, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert server.engine_pid() == engine
        assert server.complete("abc", max_tokens=2).status == 200
        return done.stdout


def _counted(report: str) -> int:
    (found,) = re.findall(r"(\d+) generated", report)
    return int(found)


def test_a_slice_of_what_schemathesis_makes_of_every_operation_is_answered(tmp_path: Path) -> None:
    report = _judge(tmp_path, "--phases", "fuzzing", "--max-examples", "4")
    assert re.search(r"(\d+) selected / \1 total", report)
    assert _counted(report) > 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_500_examples_an_operation_and_every_edge_have_no_failure(tmp_path: Path) -> None:
    report = _judge(tmp_path, "--max-examples", "500")
    print(report)
    assert _counted(report) > 5000
