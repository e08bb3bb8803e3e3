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
from kvant.kv.names import FormatRequest, parse_format
from kvant.measure.own_engine import engine_storing, plan_storing
from kvant.measure.teacher_forced import text_logits
from kvant.sampling.sampling_params import SamplingParams
from tests.engine import tiny_chat

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = ROOT / "data" / "gsm8k" / "gsm8k_test.jsonl"
CI_COUNT = 25
"""1,253 tokens of solutions. Drift over 50 problems differs by less than 10 %, bounds allow 40 %."""
CI_ANSWERS = 2
CI_ANSWER_TOKENS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tiny_chat.build(tmp_path_factory.mktemp("gsm8k"), max_position_embeddings=2048)
    return LLM(path, dtype="float32", kv_cache_dtype="float32", kv_cache_memory="8MiB")


def test_lm_eval_is_given_the_text_that_is_judged_in_process() -> None:
    """lm-eval's `loglikelihood` joins the two texts without target_delimiter between them."""
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
        "int8_per_token_head", "int4_per_token_head", "int4_short", "normal2", "nvfp4",
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
    "int4_short": (0.331, 0.15),
    "normal2": (1.742, 1.6),
    "nvfp4": (0.425, 0.25),
    "turboquant_k8/turboquant_v4": (0.158, 0.07),
    "turboquant_k4/turboquant_v4": (0.345, 0.20),
    "turboquant_k3/turboquant_v4": (0.709, 0.55),
    "turboquant_k3/turboquant_v3": (0.783, 0.65),
}
"""By format: drift a token over 50 problems as measured, and the most that solutions may be less likely, in
nats a token."""


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM("smollm2", dtype="float32", kv_cache_dtype="float32")


@pytest.mark.slow
def test_smollm2_reads_gold_solutions_as_each_format_should(smollm2: LLM) -> None:
    """Part of every submission's checks (`.ci/run`)."""
    rows = judge(smollm2, read_problems(PROBLEMS, CI_COUNT, shortest=True), all_formats())
    print(table(rows, CI_COUNT))
    truth, *others = rows
    assert truth.format == "float32"
    assert truth.mean_logprob == pytest.approx(-1.754, abs=0.01)
    assert {row.format for row in others} == set(DRIFT_AND_LOSS)
    for row in others:
        drift, loss = DRIFT_AND_LOSS[row.format]
        assert 0.6 * drift < row.drift < 1.5 * drift, f"{row.format}: stored is something else"
        assert abs(row.mean_logprob - truth.mean_logprob) < loss, row.format


@pytest.mark.slow
@pytest.mark.parametrize("wanted", all_formats(), ids=str)
def test_smollm2_answers_what_reading_finds_likeliest(smollm2: LLM, wanted: FormatRequest) -> None:
    """Decoding, token by token in one batch, is reading the same tokens at once. Part of `.ci/run`."""
    plan = plan_storing(smollm2, wanted)
    problems = read_problems(PROBLEMS, CI_ANSWERS, shortest=True)
    prompts = [list(smollm2.encode(problem.prompt)) for problem in problems]
    longest = max(map(len, prompts)) + CI_ANSWER_TOKENS
    engine = engine_storing(smollm2, plan, num_seqs=CI_ANSWERS, max_model_len=longest)
    params = SamplingParams(temperature=0, max_tokens=CI_ANSWER_TOKENS)
    asked = {engine.submit(prompt, params): prompt for prompt in prompts}
    results = []
    while engine.has_work:
        results += [piece.result for piece in engine.step() if piece.result is not None]
    runner = smollm2.engine.runner
    assert isinstance(runner, ModelRunner)
    assert len(results) == CI_ANSWERS
    for result in results:
        prompt, answer = asked[result.number], list(result.token_ids)
        assert len(answer) == CI_ANSWER_TOKENS
        logits = text_logits(runner.model, plan, prompt + answer)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-3)


def test_the_table_in_the_docs_is_the_measured_one() -> None:
    measured = json.loads((ROOT / "docs" / "benchmarks" / "smollm2-gsm8k.json").read_text())
    rows = [Judged(**row) for row in measured["rows"]]
    assert {row.format for row in rows} == {"float32", *DRIFT_AND_LOSS}
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert table(rows, measured["problems"]) in text
    options = measured["command"].partition("gsm8k ")[2]
    assert f"python -m benchmarks.gsm8k {options}" in " ".join(text.split())
