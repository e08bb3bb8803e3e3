"""Judges a running `kvant serve` with lm-eval: likelihood of GSM8K's gold solutions, and answers.

    python3 -m venv /tmp/lm-eval && /tmp/lm-eval/bin/pip install "lm-eval[api]==0.4.13" transformers
    .venv/bin/python -m benchmarks.judge_lm_eval --lm-eval /tmp/lm-eval/bin/lm_eval

lm-eval runs in a separate environment. It tokenises the prompts itself, sends token ids with
`echo` and `logprobs`, and knows nothing of Kvant. Its number is printed with the one that Kvant computes
in process; the exit code is 1 unless the two agree.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

from benchmarks.gsm8k import judge, read_problems
from kvant.cli.demo_server import served
from kvant.engine.llm import LLM
from kvant.kv.names import parse_format
from kvant.measure.quality.lm_eval import run_tasks

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data" / "gsm8k" / "gsm8k_test.jsonl"
TASKS = ("kvant_gsm8k", "kvant_gsm8k_answers")
MODEL_LEN = 2048


def run_lm_eval(
    command: Path, port: int, model: str, tokenizer: Path, count: int, tasks: tuple[str, ...]
) -> dict[tuple[str, str], float]:
    """Returns lm-eval's metrics by task and name, over the first `count` problems."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        problems = work / "problems.jsonl"
        problems.write_text("".join(DATA.read_text().splitlines(keepends=True)[:count]))
        for task in tasks:
            text = (ROOT / "benchmarks" / "lm_eval" / f"{task}.yaml").read_text()
            (work / f"{task}.yaml").write_text(text.replace("DATA", str(problems)))
        scores = run_tasks(
            command, port=port, model=model, tokenizer=tokenizer, tasks=tasks, include=work, limit=None,
            max_length=MODEL_LEN,
        )  # fmt: skip
    return {(score.task, score.metric): score.value for score in scores}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-cache-dtype", action="append", default=[], help="may be repeated")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--answers", action="store_true", help="let it generate answers too")
    options = parser.parse_args()
    problems = read_problems(DATA, options.count)
    llm = LLM(options.model, dtype="float32", kv_cache_dtype="float32")
    tasks = TASKS if options.answers else TASKS[:1]
    lines, agree = [], True
    for name in options.kv_cache_dtype or ["float32"]:
        (ours,) = judge(llm, problems, [parse_format(name, asked_by="--kv-cache-dtype")])
        flags = (
            "--dtype", "float32", "--kv-cache-dtype", name, "--max-model-len", str(MODEL_LEN),
            "--kv-cache-memory", "256MiB",
            # All of lm-eval's concurrent requests may wait: refused, it soon gives up.
            "--max-num-queued-tokens", "65536",
        )  # fmt: skip
        with served(options.model, flags) as port:
            found = run_lm_eval(
                options.lm_eval, port, options.model, llm.model_path, options.count, tasks
            )
        # lm-eval sums over tokens and averages over documents.
        theirs = -math.log(found[TASKS[0], "perplexity"]) * len(problems) / ours.tokens
        agree &= abs(theirs - ours.mean_logprob) < 2e-3
        line = f"{name}: lm-eval {theirs:.5f}, in process {ours.mean_logprob:.5f} nats a token"
        if options.answers:
            line += f"; exact match {found[TASKS[1], 'exact_match (last_number)']:.3f}"
        lines.append(line)
    print("\n".join(lines))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
