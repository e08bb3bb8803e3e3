"""GSM8K as a judge: every format reads the same solutions, and the sharper formats read them better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from benchmarks.gsm8k import (
    Judged,
    Problem,
    all_formats,
    judge,
    number,
    read_problems,
    solution_logprobs,
    table,
)
from jinja2 import Template

from kvant.engine.llm import LLM
from kvant.execution.runner import ModelRunner
from kvant.kv.names import parse_format
from kvant.measure.teacher_forced import text_logits
from tests.engine import tiny_chat

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = ROOT / "data" / "gsm8k" / "gsm8k_test.jsonl"
CI_COUNT = 50
CI_ANSWERS = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tiny_chat.build(tmp_path_factory.mktemp("gsm8k"), max_position_embeddings=2048)
    return LLM(path, dtype="float32", kv_cache_dtype="float32", kv_cache_memory="8MiB")


def test_lm_eval_is_given_the_text_that_is_judged_in_process() -> None:
    """lm-eval's `loglikelihood` joins the two texts with nothing between, whatever target_delimiter says."""
    task = yaml.safe_load((ROOT / "benchmarks" / "lm_eval" / "kvant_gsm8k.yaml").read_text())
    assert task["output_type"] == "loglikelihood"
    for problem in read_problems(PROBLEMS, 3):
        known = {"question": problem.question, "answer": problem.solution}
        asked, gold = (
            Template(task[name]).render(known) for name in ("doc_to_text", "doc_to_target")
        )
        assert asked == problem.prompt
        assert gold == " " + problem.solution


def test_numbers_are_read_as_people_write_them() -> None:
    assert number("so 3 and then #### 1,234") == "1234"
    assert number("it costs $18.00.") == "18"
    assert number("-5 degrees") == "-5"
    assert number("none") == ""
    problem = Problem("q", "<<2*3=6>>6 eggs\n#### 6")
    assert problem.answer == "6"
    assert problem.solved_by("that makes 6 eggs")
    assert not problem.solved_by("6 or 7")
    assert not problem.solved_by("")


def test_several_solutions_in_one_step_are_as_likely_as_each_alone(tiny: LLM) -> None:
    runner = tiny.engine.runner
    assert isinstance(runner, ModelRunner)
    texts = []
    for problem in read_problems(PROBLEMS, 3):
        question = tiny.encode(problem.prompt)
        texts.append(([*question, *tiny.encode(" " + problem.solution)], len(question)))
    found = solution_logprobs(runner.model, tiny.plan, texts)
    parts = []
    for tokens, question in texts:
        likely = text_logits(runner.model, tiny.plan, tokens).log_softmax(-1)
        targets = torch.tensor(tokens[question:])
        parts.append(likely[question - 1 : -1].gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(parts).double(), rtol=0, atol=1e-4)


def test_every_format_reads_gold_solutions(tiny: LLM) -> None:
    """The comparison itself on a model that costs nothing: all formats, native dtypes included."""
    short = [Problem(p.question[:60], p.solution[-60:]) for p in read_problems(PROBLEMS, 12)]
    rows = {row.format: row for row in judge(tiny, short, all_formats())}
    assert set(rows) == {
        "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head",
        "int8_per_token_head", "int4_per_token_head", "nvfp4",
        "turboquant_k8/turboquant_v4", "turboquant_k4/turboquant_v4",
        "turboquant_k3/turboquant_v4", "turboquant_k3/turboquant_v3",
    }  # fmt: skip
    assert rows["float32"].drift == 0
    drifts = [rows[name].drift for name in ("float16", "bfloat16", "fp8_e5m2", "nvfp4")]
    assert drifts == sorted(drifts)
    assert drifts[0] > 0
    assert rows["int8_per_token_head"].drift < rows["int4_per_token_head"].drift
    assert len({row.tokens for row in rows.values()}) == 1
    assert table(list(rows.values()), 12).count("\n") == len(rows) + 1


def test_answers_are_generated_through_the_format(tiny: LLM) -> None:
    (row,) = judge(
        tiny,
        read_problems(PROBLEMS, 2),
        [parse_format("fp8_per_token_head", asked_by="test")],
        answer_tokens=4,
    )
    assert row.right == 0, "a random model knows no arithmetic"


DRIFT_AND_LOSS = {
    "float16": (0.0009, 0.001),
    "bfloat16": (0.0068, 0.003),
    "fp8_e4m3": (0.110, 0.03),
    "fp8_e5m2": (0.237, 0.08),
    "fp8_per_token_head": (0.092, 0.03),
    "int8_per_token_head": (0.036, 0.01),
    "int4_per_token_head": (0.332, 0.15),
    "nvfp4": (0.425, 0.25),
    "turboquant_k8/turboquant_v4": (0.158, 0.07),
    "turboquant_k4/turboquant_v4": (0.345, 0.20),
    "turboquant_k3/turboquant_v4": (0.709, 0.55),
    "turboquant_k3/turboquant_v3": (0.783, 0.65),
}
"""By format: drift a token as measured, and the most that solutions may be less likely, in nats a token."""
MOST_RIGHT_APART = 2
"""Answers of CI_ANSWERS. The model solves next to none, in any format."""


@pytest.mark.slow
def test_smollm2_reads_fifty_problems_and_answers_some_as_each_format_should() -> None:
    """Part of every submission's checks (`.ci/run`)."""
    llm = LLM("smollm2", dtype="float32", kv_cache_dtype="float32")
    problems = read_problems(PROBLEMS, CI_COUNT, shortest=True)
    rows = judge(llm, problems, all_formats(), answer_tokens=48, num_answers=CI_ANSWERS)
    print(table(rows, CI_COUNT))
    truth, *others = rows
    assert truth.format == "float32"
    assert truth.mean_logprob == pytest.approx(-1.678, abs=0.01)
    assert truth.right is not None
    assert {row.format for row in others} == set(DRIFT_AND_LOSS)
    for row in others:
        drift, loss = DRIFT_AND_LOSS[row.format]
        assert 0.6 * drift < row.drift < 1.5 * drift, f"{row.format}: stored is something else"
        assert abs(row.mean_logprob - truth.mean_logprob) < loss, row.format
        assert row.right is not None
        assert abs(row.right - truth.right) <= MOST_RIGHT_APART, row.format


def test_the_table_in_the_docs_is_the_measured_one() -> None:
    measured = json.loads((ROOT / "docs" / "benchmarks" / "smollm2-gsm8k.json").read_text())
    rows = [Judged(**row) for row in measured["rows"]]
    assert {row.format for row in rows} == {"float32", *DRIFT_AND_LOSS}
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert table(rows, measured["problems"]) in text
    options = measured["command"].partition("gsm8k ")[2]
    assert f"python -m benchmarks.gsm8k {options}" in " ".join(text.split())
