"""Judges formats by school arithmetic (GSM8K): likelihood of gold solutions, and number of right answers.

    python -m benchmarks.gsm8k --shortest --answer-tokens 48 --out docs/benchmarks/smollm2-gsm8k.json

Every format reads the same questions and solutions through its own paged cache. The likelihood is the
sharper number: a small model answers almost nothing right, in any format.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.json_lines import read_texts
from kvant.attention.backends import load_backends
from kvant.attention.base import Step, StepCall
from kvant.engine.llm import LLM
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import KVDtype
from kvant.kv.names import FormatRequest, parse_format, whole_formats
from kvant.kv.pool import SCRATCH_PAGE, KVPool
from kvant.kv.spec import KVPlan
from kvant.measure.facts import command_line, measurement_facts
from kvant.measure.own_engine import engine_over, plan_storing, runner_of
from kvant.models.loaded import LoadedModel
from kvant.sampling.sampling_params import SamplingParams

STEP_TOKENS = 2048
"""Approximate tokens of solutions, or questions, that one step reads."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its gold solution, which ends with "#### NUMBER"."""

    question: str
    solution: str

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def answer(self) -> str:
        return number(self.solution.split("####")[1])

    def solved_by(self, text: str) -> bool:
        """Whether the last number of an answer is that of the gold solution."""
        return number(text) == self.answer


@dataclass(frozen=True, slots=True)
class Judged:
    """One format's results.

    mean_logprob: of the gold solutions' tokens, in nats. drift: its mean absolute distance from float32 KV
    over tokens. right: number of right answers; None if none were generated. backends: of the layers.
    """

    format: str
    backends: tuple[str, ...]
    bytes_per_token: int
    mean_logprob: float
    drift: float
    tokens: int
    right: int | None
    seconds: float


def read_problems(path: Path, count: int, *, shortest: bool = False) -> list[Problem]:
    """Returns the first `count` problems of a file of JSON lines, or the ones with the shortest texts."""
    found = read_texts(path, ("question",), ("answer",), count=count, shortest=shortest)
    return [Problem(question, answer) for question, answer in found]


def number(text: str) -> str:
    """Returns the last number of a text, without separators; empty without one."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").removesuffix(".00") if found else ""


def all_formats() -> list[FormatRequest]:
    """Returns float32, then every other format a user can name."""
    first = FormatRequest(KVDtype.FLOAT32, KVDtype.FLOAT32)
    return [first, *(asked for asked in whole_formats() if asked != first)]


def solution_logprobs(
    model: LoadedModel, plan: KVPlan, texts: Sequence[tuple[Sequence[int], int]]
) -> torch.Tensor:
    """Returns the log-probability of every token of every solution, in order, float64.

    texts: tokens of question and solution, and the number of the question's. Several are read in one step;
    attention reads what the cache stores, as in generation.
    """
    parts = []
    for group in _groups(texts):
        lengths = [len(tokens) for tokens, _ in group]
        pages = [-(-length // plan.page_size) for length in lengths]
        pool = KVPool(plan, SCRATCH_PAGE + 1 + sum(pages), device=model.device, scales=model.scales)
        table = torch.full((len(group), max(pages)), SCRATCH_PAGE, dtype=torch.int32)
        positions, slots, wanted, targets = [], [], [], []
        page, row = SCRATCH_PAGE + 1, 0
        for index, (tokens, question) in enumerate(group):
            table[index, : pages[index]] = torch.arange(page, page + pages[index])
            place = torch.arange(len(tokens))
            positions.append(place)
            slots.append(place + page * plan.page_size)
            wanted.append(torch.arange(row + question - 1, row + len(tokens) - 1))
            targets.append(torch.tensor(tokens[question:]))
            page, row = page + pages[index], row + len(tokens)
        cumulated = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        device = model.device
        step = Step(
            cu_seqlens_q=cumulated.to(device),
            seqlens_kv=torch.tensor(lengths, dtype=torch.int32, device=device),
            page_table=table.to(device),
            slot_mapping=torch.cat(slots).to(device),
            positions=torch.cat(positions).to(device),
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        ids = torch.tensor([token for tokens, _ in group for token in tokens], device=device)
        call = StepCall(step, pool, load_backends(plan))
        logits = model.forward(ids, call, torch.cat(wanted).to(device))
        target = torch.cat(targets).to(device)
        logits = logits.float()
        chosen = logits.gather(1, target[:, None])[:, 0]
        parts.append((chosen.double() - logits.logsumexp(-1).double()).cpu())
    return torch.cat(parts)


def judge(
    llm: LLM,
    problems: Sequence[Problem],
    formats: Iterable[FormatRequest],
    *,
    answer_tokens: int = 0,
) -> list[Judged]:
    """Judges every format on the model of `llm`; drift is measured from the first one.

    answer_tokens: length of a greedy answer to each question; 0 skips answers.
    """
    runner = runner_of(llm)
    texts = []
    for problem in problems:
        question = llm.encode(problem.prompt)
        texts.append(([*question, *llm.encode(" " + problem.solution)], len(question)))
    truth: torch.Tensor | None = None
    rows = []
    for wanted in formats:
        started = time.perf_counter()
        plan = plan_storing(llm, wanted)
        found = solution_logprobs(runner.model, plan, texts)
        truth = found if truth is None else truth
        right = None
        if answer_tokens:
            right = _num_right(llm, plan, problems, answer_tokens)
        rows.append(
            Judged(
                format=str(wanted),
                backends=tuple(sorted({layer.backend for layer in plan.layers if layer.backend})),
                bytes_per_token=plan.bytes_per_token,
                mean_logprob=found.mean().item(),
                drift=(found - truth).abs().mean().item(),
                tokens=len(found),
                right=right,
                seconds=time.perf_counter() - started,
            )
        )
    return rows


def _num_right(llm: LLM, plan: KVPlan, problems: Sequence[Problem], answer_tokens: int) -> int:
    """Generates greedy answers of `llm`'s model through pages of this plan, all side by side.

    Counts right ones.
    """
    runner = runner_of(llm)
    prompts = [llm.encode(problem.prompt) for problem in problems]
    longest = max(map(len, prompts)) + answer_tokens + 1
    num_pages = 1 + len(prompts) * -(-longest // plan.page_size)
    engine = engine_over(
        llm,
        ModelRunner(runner.model, num_pages, plan),
        plan,
        num_pages,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=longest,
        prefix_caching=True,
        answers=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, stop=("Question:",))
    asked = {engine.submit(prompt, params): p for prompt, p in zip(prompts, problems, strict=True)}
    right = 0
    while engine.has_work:
        for piece in engine.step():
            if piece.result is not None:
                right += asked[piece.number].solved_by(piece.result.text)
    return right


def _groups(
    texts: Sequence[tuple[Sequence[int], int]],
) -> Iterable[list[tuple[Sequence[int], int]]]:
    group: list[tuple[Sequence[int], int]] = []
    size = 0
    for text in texts:
        if group and size + len(text[0]) > STEP_TOKENS:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text[0])
    yield group


def table(rows: Sequence[Judged], count: int) -> str:
    """Formats results as Markdown."""
    lines = [
        "| KV format | B/token | mean log-likelihood | drift a token | right |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        right = "-" if row.right is None else f"{row.right} of {count}"
        lines.append(
            f"| {row.format} | {row.bytes_per_token:,} | {row.mean_logprob:.4f} | {row.drift:.4f} "
            f"| {right} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--problems", type=Path, default=Path("data/gsm8k/gsm8k_test.jsonl"))
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--shortest", action="store_true", help="the shortest, not the first ones")
    parser.add_argument("--kv-format", action="append", default=[], help="all without")
    parser.add_argument("--answer-tokens", type=int, default=0, help="0: no answers")
    parser.add_argument("--out", type=Path, help="JSON result")
    options = parser.parse_args(arguments)
    llm = LLM(
        options.model,
        dtype="float32",
        kv_cache_dtype="float32",
        device=options.device,
        kv_cache_memory="256MiB",
    )
    formats = [
        parse_format(name, asked_by="--kv-format") for name in options.kv_format
    ] or all_formats()
    problems = read_problems(options.problems, options.count, shortest=options.shortest)
    rows = judge(llm, problems, formats, answer_tokens=options.answer_tokens)
    print(table(rows, len(problems)))
    if options.out is not None:
        facts = {
            **measurement_facts(command_line("python -m benchmarks.gsm8k", arguments), ("torch",)),
            "threads": torch.get_num_threads(),
            "model": options.model,
            "problems": len(problems),
            "rows": [asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
