"""Scores that lm-eval writes, and what a user without lm-eval is told."""

from __future__ import annotations

import math
import stat
from pathlib import Path

import pytest

from kvant.errors import BadValue
from kvant.measure.quality.lm_eval import Score, find_command, run_tasks, scores_of

RESULTS = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.05,
            "exact_match,flexible-extract": 0.0,
            "exact_match_stderr,flexible-extract": 0.0,
        },
        "text": {"perplexity,none": 12.5, "perplexity_stderr,none": "N/A"},
    },
    "n-samples": {"gsm8k": {"original": 1319, "effective": 100}},
}


def test_scores_have_their_errors_and_the_documents_a_difference_needs() -> None:
    strict, flexible, perplexity = scores_of(RESULTS)
    assert strict == Score("gsm8k", "exact_match (strict-match)", 0.5, 0.05, 100)
    # 2 * 2.8^2 * 0.25 / 0.05^2: two shares of one half
    assert strict.samples_needed == math.ceil(2 * 2.8**2 * 0.25 / 0.05**2)
    assert flexible.samples_needed is None
    assert perplexity == Score("text", "perplexity", 12.5, None, 0)
    assert perplexity.samples_needed is None


def test_without_lm_eval_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(BadValue, match="lm-eval was not found") as caught:
        find_command(None)
    assert any("pip install" in str(way) for way in caught.value.ways_out)
    (tmp_path / "lm_eval").touch(mode=0o755)
    assert find_command(None) == tmp_path / "lm_eval"
    monkeypatch.chdir(tmp_path)  # lm-eval runs in a directory of its own
    assert find_command(Path("lm_eval")) == tmp_path / "lm_eval"
    (tmp_path / "text").touch(mode=0o644)
    with pytest.raises(BadValue, match="cannot be run"):
        find_command(Path("text"))


def test_a_failure_of_lm_eval_is_reported_by_its_last_line(tmp_path: Path) -> None:
    command = tmp_path / "lm_eval"
    command.write_text("#!/bin/sh\necho Loading >&2\necho 'ValueError: no such task' >&2\nexit 1\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(BadValue, match="failed for nothing") as caught:
        run_tasks(
            command, port=1, model="m", tokenizer=tmp_path, tasks=["nothing"], include=None, limit=None,
            max_length=64,
        )  # fmt: skip
    assert caught.value.why == "ValueError: no such task"
    command.write_text('#!/bin/sh\necho "$@" >&2\nexit 1\n')
    with pytest.raises(BadValue) as caught:
        run_tasks(
            command, port=1, model="m", tokenizer=Path("here"), tasks=["any"], include=None, limit=None,
            max_length=64,
        )  # fmt: skip
    assert f"tokenizer={Path('here').absolute()}," in caught.value.why, "lm-eval runs elsewhere"
