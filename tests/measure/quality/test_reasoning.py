"""`kvant eval --long-reasoning`: which answers count as right, error bars, and the same engine loop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvant.engine.llm import LLM
from kvant.errors import BadValue
from kvant.kv.names import parse_format
from kvant.measure.own_engine import plan_storing
from kvant.measure.quality.evaluate import run_parts
from kvant.measure.quality.kept import Kept
from kvant.measure.quality.reasoning import (
    Problem,
    Reasoning,
    Sampling,
    final_answer,
    mean_and_error,
    problems_for,
    read_problems,
    report,
)
from kvant.sampling.sampling_params import SamplingParams
from tests.cli.command import kvant
from tests.engine import tiny_chat


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3 and 4\n#### 1,234", "1234"),
        (r"thus \boxed{\frac{1}{2}} not \boxed{2} but \boxed{x^{2}+1}", "x^{2}+1"),
        (r"first \boxed{7}, and then \boxed{8", "7"),
        ("The answer is $72$.", "72"),
        ("The answer is 5. Wait, the answer is: 6 apples, not 9", "6"),
        ("it costs 3 dollars, so 12.50 in all", "25/2"),
        ("2/4", "1/2"),
        ("forty\ntwo", ""),
        ("B", "b"),
        ("Answer: B", "b"),
    ],
)
def test_the_final_answer_of_a_text(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_problems_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(
        '{"question": "1+1?", "answer": "one and one\\n#### 2"}\n\n{"problem": "2*2?", "answer": 4}\n'
    )
    assert read_problems(path, None) == [Problem("1+1?", "2"), Problem("2*2?", "4")]
    assert len(read_problems(path, 1)) == 1
    path.write_text('{"question": "1+1?", "answer": "2"}\n{"text": "no question"}\n')
    with pytest.raises(BadValue, match="line 2 holds no problem"):
        read_problems(path, None)
    path.write_text("\n")
    with pytest.raises(BadValue, match="holds no problem"):
        read_problems(path, None)


def test_errors_count_problems_and_not_answers() -> None:
    means = np.array([1.0, 0.5, 0.0, 0.5])
    mean, error = mean_and_error(means)
    assert mean == 0.5
    assert error == pytest.approx(np.sqrt(np.sum((means - 0.5) ** 2) / 3) / 2)
    assert problems_for(means - means, 0.05) is None
    assert problems_for(np.array([0.1, -0.1]), 0.1) == 16  # 2.8^2 * 0.02 / 0.1^2 = 15.7
    assert problems_for(means[:1], 0.05) is None


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    torch.set_num_threads(1)
    path = tiny_chat.build(tmp_path_factory.mktemp("reasoning"))
    return LLM(path, dtype="float32", kv_cache_memory="1MiB", max_model_len=128)


def test_answers_are_those_of_the_engine_and_are_kept(llm: LLM, tmp_path: Path) -> None:
    sampling = Sampling(2, 6, 0.8, 0.9)
    plans = {
        name: plan_storing(llm, parse_format(name, asked_by="test"))
        for name in ("float32", "int4_per_token_head")
    }
    question = "measure twice"
    prompt = llm.encode_chat([{"role": "user", "content": question}])
    texts = [
        llm.generate([prompt], SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=6))[0]
        for seed in (0, 1)
    ]  # fmt: skip
    right = final_answer("the answer is " + texts[1].text.splitlines()[0]) or "nothing"
    expected = [final_answer(one.text) == right for one in texts]
    reasoning = Reasoning(
        llm, plans, [Problem(question, right), Problem("the sea", "no")], sampling
    )
    kept = Kept(tmp_path, reasoning.inputs())
    parts = run_parts(reasoning.parts(), kept, lambda *_: None)
    assert parts["0-0"]["right"][0].tolist() == expected
    assert parts["0-0"]["length"][0].tolist() == [len(one.token_ids) for one in texts]
    found = report(reasoning, parts)
    assert found["baseline"] == "float32"
    assert found["formats"]["float32"]["pass_at_1"] == pytest.approx(np.mean(expected) / 2)
    assert found["formats"]["float32"]["against_baseline"] == 0
    assert len(kept) == 2


def test_answers_of_another_backend_are_not_continued(llm: LLM) -> None:
    plan = plan_storing(llm, parse_format("float32", asked_by="test"))
    other = replace(plan, layers=tuple(replace(one, backend="other") for one in plan.layers))
    inputs = [
        Reasoning(llm, {"float32": one}, [Problem("1 + 1", "2")], Sampling(1, 4, 0.0, 1.0)).inputs()
        for one in (plan, plan, other)
    ]
    assert inputs[0] == inputs[1] != inputs[2]


def test_answers_that_do_not_fit_are_refused_with_what_fits(llm: LLM) -> None:
    plans = {"float32": plan_storing(llm, parse_format("float32", asked_by="test"))}
    with pytest.raises(BadValue, match="do not fit") as caught:
        Reasoning(llm, plans, [Problem("the sea", "1")], Sampling(1, 10**6, 0, 1))
    (way,) = caught.value.ways_out
    fitting = int(way.arguments[1])
    assert Reasoning(llm, plans, [Problem("the sea", "1")], Sampling(1, fitting, 0, 1)).parts()


def test_the_command_prints_scores(tmp_path: Path) -> None:
    model = tiny_chat.build(tmp_path)
    path, out = tmp_path / "problems.jsonl", tmp_path / "out.json"
    path.write_text(json.dumps({"question": "the sea", "answer": "1"}) + "\n")
    shown = kvant(
        "eval", str(model), "--dtype", "float32", "--long-reasoning", str(path), "--samples", "2",
        "--answer-tokens", "4", "--kv-format", "fp8", "--out", str(out),
    )  # fmt: skip
    assert shown.code == 0, shown.err
    assert "pass@1" in shown.out
    assert "1 problem, 2 answers each of at most 4 tokens" in " ".join(shown.out.split())
    assert set(json.loads(out.read_text())["formats"]) == {"model", "fp8_e4m3"}


def test_answers_read_wide_rows_too(tmp_path: Path) -> None:
    model = tiny_chat.build(tmp_path)
    path, out = tmp_path / "problems.jsonl", tmp_path / "out.json"
    path.write_text(json.dumps({"question": "the sea " * 40, "answer": "1"}) + "\n")
    shown = kvant(
        "eval", str(model), "--dtype", "float32", "--long-reasoning", str(path), "--samples", "2",
        "--answer-tokens", "4", "--kv-format", "int4_per_token_head", "--kv-recent-tokens", "16",
        "--out", str(out), env={"KVANT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert shown.code == 0, shown.err
    found = json.loads(out.read_text())
    assert found["wide_rows"] == {"sink": 16, "recent": 16, "k": "float32", "v": "float32"}
    narrow = plan_storing(
        LLM(model, dtype="float32", kv_cache_memory="1MiB"),
        parse_format("int4_per_token_head", asked_by="test"),
    )
    assert found["formats"]["int4_per_token_head"]["bytes_per_token"] > narrow.bytes_per_token


def test_options_that_do_not_go_together_are_refused_before_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "the sea", "answer": "1"}) + "\n")
    for options, said in (
        (("--long-reasoning", problems, "--tasks", "gsm8k"), "are two measurements"),
        (("--long-reasoning", problems, "--html", tmp_path / "a.html"), "has no plots"),
        (("--long-reasoning", tmp_path / "none.jsonl"), "cannot be read"),
        (("--text", tmp_path / "none.txt"), "cannot be read"),
        (("--tasks", "gsm8k", "--lm-eval", tmp_path / "none"), "lm-eval was not found"),
        (("--tasks", "gsm8k", "--quick"), "--quick has no effect here"),
        (("--tasks", "gsm8k", "--samples", "2"), "--samples has no effect here"),
        (("--tasks", "gsm8k", "--restart"), "--restart has no effect here"),
        (("--long-reasoning", problems, "--context", "512"), "--context has no effect here"),
        (("--limit", "3"), "--limit has no effect here"),
        (("--include-path", tmp_path), "--include-path has no effect here"),
    ):
        ran = kvant("eval", "no-such-model", *options)
        assert ran.code == 2
        assert said in ran.err, ran.err
