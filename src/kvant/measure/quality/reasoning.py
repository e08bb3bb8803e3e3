"""Answers sampled in each format to problems from a local file, judged by exact match."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvant.engine.llm import LLM
from kvant.errors import BadValue, WayOut
from kvant.kv.groups import bytes_per_token_at
from kvant.kv.pages import SCRATCH
from kvant.kv.spec import KVPlan
from kvant.measure.own_engine import engine_over, runner_storing
from kvant.measure.quality.compare import OnProgress
from kvant.measure.quality.evaluate import Part
from kvant.measure.quality.kept import measured_by
from kvant.measure.quality.report import described_rows
from kvant.sampling.sampling_params import SamplingParams
from kvant.scheduling.request import FinishReason

MOST_SEQS, STEP_TOKENS, POOL_BYTES = 64, 2048, 4 << 30
PROBLEMS_OF_PART = 8
_QUESTIONS, _ANSWERS = ("problem", "question", "prompt"), ("answer", "solution", "expected")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_NAMED = re.compile(r"(?:####|answer\s*(?:is|:))[:\s]*", re.IGNORECASE)
_PLAIN = "Question: {question}\nAnswer:"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem to solve. answer: what `final_answer` returns for a correct solution."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How problems are answered: `samples` times each, with at most `answer_tokens` tokens."""

    samples: int
    answer_tokens: int
    temperature: float
    top_p: float

    def params(self, sample: int) -> SamplingParams:
        """Returns parameters with seeds that all formats share, so that draws do not add to differences."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=sample,
            max_tokens=self.answer_tokens,
        )


def read_problems(path: Path, count: int | None) -> list[Problem]:
    """Reads JSON lines with a question (`problem`, `question` or `prompt`) and its answer (`answer`,
    `solution` or `expected`). The answer of a solution that ends with "#### 42" or "\\boxed{42}" is 42.
    count: maximum number of problems.

    Raises BadValue for a file without problems, and names the first line that is not a problem.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "it is not text in UTF-8"
        raise BadValue(f"--long-reasoning {path} cannot be read", why=str(why)) from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_problem(line, f"{path}, line {number}"))
        if len(found) == count:
            break
    if not found:
        raise BadValue(f"--long-reasoning {path} holds no problem", why="it is empty")
    return found


def _problem(line: str, where: str) -> Problem:
    try:
        body = json.loads(line)
    except ValueError:
        body = None
    fields = body if isinstance(body, dict) else {}
    question = next((fields[name] for name in _QUESTIONS if fields.get(name)), None)
    answer = next((fields[name] for name in _ANSWERS if fields.get(name) is not None), None)
    expected = final_answer(str(answer)) if answer is not None else ""
    if not isinstance(question, str) or not expected:
        raise BadValue(
            f"{where} holds no problem",
            why=f"a line is a JSON object with a text under {', '.join(_QUESTIONS)} and an answer under "
            f"{', '.join(_ANSWERS)}",
        )
    return Problem(question, expected)


def final_answer(text: str) -> str:
    """Returns the answer at the end of a text, normalised; empty if there is none.

    It is the first that exists of: the last \\boxed{..}; the text after the last "####", "answer is" or
    "answer:", or its number; the last number; the whole text if it is one line.
    """
    if (boxed := _last_boxed(text)) is not None:
        return normalized(boxed)
    named = list(_NAMED.finditer(text))
    tail = text[named[-1].end() :].partition("\n")[0] if named else text
    if numbers := _NUMBER.findall(tail):
        return normalized(numbers[0] if named else numbers[-1])
    return normalized(tail) if named or "\n" not in text.strip() else ""


def _last_boxed(text: str) -> str | None:
    """Returns the content of the last complete \\boxed{..}."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for place in range(start + 6, len(text)):
            depth += (text[place] == "{") - (text[place] == "}")
            if depth == 0:
                return text[start + 7 : place]
        start = text.rfind("\\boxed{", 0, start)
    return None


def normalized(answer: str) -> str:
    """Removes spaces, dollar signs, thousands separators and a final dot; reduces numbers to lowest terms."""
    answer = re.sub(r"[\s$]|\\[,;!]|(?<=\d),(?=\d{3})", "", answer).rstrip(".").lower()
    try:
        return str(Fraction(answer))
    except (ValueError, ZeroDivisionError):
        return answer


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The measurement: problems, answered in each format. Raises BadValue if answers do not fit the model."""

    llm: LLM
    plans: Mapping[str, KVPlan]
    problems: Sequence[Problem]
    sampling: Sampling

    def __post_init__(self) -> None:
        longest = self.llm.planned.target.geometry.max_model_len
        needed = max(len(self.prompt(p)) for p in self.problems) + self.sampling.answer_tokens
        if longest is not None and needed > longest:
            room = longest - needed + self.sampling.answer_tokens
            raise BadValue(
                f"--answer-tokens {self.sampling.answer_tokens} do not fit after the longest problem",
                why=f"the model's positions end at {longest}",
                ways_out=(WayOut("take shorter answers", ("--answer-tokens", str(max(1, room)))),),
            )

    def prompt(self, problem: Problem) -> Sequence[int]:
        """Returns the tokens of a problem as a chat, or as "Question: .. Answer:" without a chat template."""
        tokenizing = self.llm.tokenizing
        if tokenizing is not None and tokenizing.has_chat_template:
            return self.llm.encode_chat([{"role": "user", "content": problem.question}])
        return self.llm.encode(_PLAIN.format(question=problem.question))

    def inputs(self) -> dict[str, object]:
        """Returns everything on which the answers depend."""
        text = json.dumps([asdict(problem) for problem in self.problems])
        return {
            **measured_by(self.llm),
            "plans": {name: plan.fingerprint for name, plan in self.plans.items()},
            "backends": {n: [s.backend for s in p.layers] for n, p in self.plans.items()},
            "problems": hashlib.sha256(text.encode()).hexdigest(),
            "sampling": asdict(self.sampling),
        }

    def parts(self) -> list[Part]:
        """Returns parts with a few problems in one format each.

        All formats of a few problems come together.
        """
        found = []
        for first in range(0, len(self.problems), PROBLEMS_OF_PART):
            batch = self.problems[first : first + PROBLEMS_OF_PART]
            tokens = len(batch) * self.sampling.samples * self.sampling.answer_tokens
            for number, plan in enumerate(self.plans.values()):
                found.append(Part(f"{first}-{number}", tokens, partial(self._answer, plan, batch)))
        return found

    def _answer(
        self, plan: KVPlan, problems: Sequence[Problem], on_progress: OnProgress
    ) -> Mapping[str, npt.NDArray[Any]]:
        prompts = [self.prompt(problem) for problem in problems]
        sampling = self.sampling
        longest = max(map(len, prompts)) + sampling.answer_tokens
        pages = -(-longest // plan.page_size)
        fitting = POOL_BYTES // max(1, pages * plan.page_size * _bytes_of_both_forms(plan))
        num_seqs = max(1, min(MOST_SEQS, fitting, len(prompts) * sampling.samples))
        num_pages, longest = SCRATCH + 1 + num_seqs * pages, pages * plan.page_size
        runner = runner_storing(self.llm, plan, num_pages, num_seqs=num_seqs, max_model_len=longest)
        engine = engine_over(
            self.llm, runner, plan, num_pages, max_num_seqs=num_seqs, max_num_batched_tokens=STEP_TOKENS,
            max_model_len=longest, prefix_caching=not plan.has_states, answers=True,
        )  # fmt: skip
        right = np.zeros((len(problems), sampling.samples), bool)
        cut = np.zeros_like(right)
        length = np.zeros(right.shape, np.int64)
        asked = {
            engine.submit(prompt, sampling.params(sample)): (index, sample)
            for index, prompt in enumerate(prompts)
            for sample in range(sampling.samples)
        }
        while engine.has_work:
            for piece in engine.step():
                if (result := piece.result) is not None:
                    place = asked[piece.number]
                    right[place] = final_answer(result.text) == problems[place[0]].answer
                    cut[place] = result.finish_reason is FinishReason.LENGTH
                    length[place] = len(result.token_ids)
                    on_progress(sampling.answer_tokens)
        return {"right": right, "cut": cut, "length": length}


def _bytes_of_both_forms(plan: KVPlan) -> int:
    """Returns a token's bytes in the engines here: without groups, pages hold wide rows of every token."""
    wide = sum(spec.wide_spec.bytes_per_token for spec in plan.layers if spec.wide_spec is not None)
    return plan.bytes_per_token + wide


def mean_and_error(by_problem: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Returns the mean of by_problem [problems] and its standard error.

    A problem is one independent sample.
    """
    count = len(by_problem)
    error = float(np.std(by_problem, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return float(np.mean(by_problem)), error


def problems_for(differences: npt.NDArray[np.float64], wanted: float) -> int | None:
    """Returns how many problems show a difference of `wanted` in pass@1 with 80 % power at the 5 % level.

    differences: [problems], between two formats. n = (1.96 + 0.84)^2 * variance / wanted^2, the usual formula
    for a paired test. Returns None for fewer than two problems, or if no problem differs.
    """
    if len(differences) < 2 or not differences.any():
        return None
    return math.ceil(2.8**2 * float(np.var(differences, ddof=1)) / wanted**2)


def report(
    reasoning: Reasoning, parts: Mapping[str, Mapping[str, npt.NDArray[Any]]]
) -> dict[str, Any]:
    """Returns figures by format.

    pass_at_1: share of right answers, mean over problems. `against_baseline`: its difference from the first
    format's, paired by problem. bytes_per_token: at the mean length of prompt and answer, with wide rows.
    parts: arrays "right", "cut" and "length", [problems, samples], by part name.
    """
    firsts = range(0, len(reasoning.problems), PROBLEMS_OF_PART)
    asked = float(np.mean([len(reasoning.prompt(problem)) for problem in reasoning.problems]))
    found: dict[str, dict[str, Any]] = {}
    base: npt.NDArray[np.float64] | None = None
    for number, (name, plan) in enumerate(reasoning.plans.items()):
        of = {
            key: np.concatenate([parts[f"{first}-{number}"][key] for first in firsts])
            for key in ("right", "cut", "length")
        }
        by_problem = of["right"].mean(axis=1)
        base = by_problem if base is None else base
        score, error = mean_and_error(by_problem)
        change, change_error = mean_and_error(by_problem - base)
        found[name] = {
            "bytes_per_token": round(
                bytes_per_token_at(plan, max(1, round(asked + float(of["length"].mean()))))
            ),
            "pass_at_1": score,
            "pass_at_1_error": error,
            "against_baseline": change,
            "against_baseline_error": change_error,
            "problems_for_5_points": problems_for(by_problem - base, 0.05),
            "cut": float(of["cut"].mean()),
            "mean_tokens": float(of["length"].mean()),
        }
    return {
        "schema": 1,
        "model": reasoning.llm.plan.model,
        "problems": len(reasoning.problems),
        "sampling": asdict(reasoning.sampling),
        "baseline": next(iter(found)),
        **described_rows(reasoning.plans.values()),
        "formats": found,
    }
