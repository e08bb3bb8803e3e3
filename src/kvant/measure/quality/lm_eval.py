"""Runs lm-eval's tasks against a server: https://github.com/EleutherAI/lm-evaluation-harness."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.errors import BadValue, WayOut

WANTED_DIFFERENCE = 0.05
_POWER = 1.96 + 0.84  # 5 % level, 80 % power


@dataclass(frozen=True, slots=True)
class Score:
    """One metric of a task. metric: with its filter, as lm-eval names it. error: standard error, None if
    lm-eval gives none. samples: number of judged documents.
    """

    task: str
    metric: str
    value: float
    error: float | None
    samples: int

    @property
    def samples_needed(self) -> int | None:
        """Documents per format needed to see a difference of WANTED_DIFFERENCE: n = 2 z^2 p (1 - p) / d^2 for
        two independent shares p. None for a metric that is not a share, and if all documents have the same
        result.
        """
        if not self.error or not 0 <= self.value <= 1:
            return None
        variance = self.error**2 * self.samples
        return math.ceil(2 * _POWER**2 * variance / WANTED_DIFFERENCE**2)


def find_command(given: Path | None) -> Path:
    """Returns the lm_eval command, absolute: as given, beside this Python, or on PATH.

    Raises BadValue if there is none that can be run.
    """
    beside = Path(sys.executable).with_name("lm_eval")
    found = given or (beside if beside.is_file() else shutil.which("lm_eval"))
    if found is None or not Path(found).is_file():
        raise BadValue(
            f"lm-eval was not found{f': {given}' if given else ''}",
            why="--tasks runs the command lm_eval, which has many packages of its own",
            ways_out=(
                WayOut(
                    'install it: pip install "lm-eval[api]" transformers, best in an environment of its own'
                ),
                WayOut("name the command", ("--lm-eval", "PATH/bin/lm_eval")),
            ),
        )
    command = Path(
        found
    ).absolute()  # not resolved: it may be a link to a Python with other packages
    if not os.access(command, os.X_OK):
        raise BadValue(f"{command} cannot be run", why="it is not executable")
    return command


def run_tasks(
    command: Path,
    *,
    port: int,
    model: str,
    tokenizer: Path,
    tasks: Sequence[str],
    include: Path | None,
    limit: int | None,
    max_length: int,
    chat: bool = False,
) -> list[Score]:
    """Runs tasks against the server on `port` and returns every metric.

    include: directory of YAML files of tasks, whose data may be local. limit: documents per task. max_length:
    tokens per request. chat: use the model's chat template, for tasks that generate. Raises BadValue with the
    last line of lm-eval's output if it fails.
    """
    route = "chat/completions" if chat else "completions"
    arguments = (
        f"model={model},base_url=http://127.0.0.1:{port}/v1/{route},tokenizer={tokenizer.absolute()},"
        f"tokenized_requests={not chat},num_concurrent=8,max_length={max_length}"
    )
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        line = [
            str(command), "--model", f"local-{'chat-' if chat else ''}completions", "--model_args", arguments,
            "--tasks", ",".join(tasks), "--output_path", str(work / "out"), "--seed", "1234",
            "--batch_size", "4",
        ]  # fmt: skip
        line += ["--include_path", str(include.absolute())] if include else []
        line += ["--limit", str(limit)] if limit else []
        line += ["--apply_chat_template"] if chat else []
        # lm-eval runs in a separate environment.
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(line, env=environment, cwd=work, capture_output=True, text=True)
        found = sorted((work / "out").rglob("results*.json"))
        if done.returncode or not found:
            said = [text for text in done.stderr.splitlines() if text.strip()] or ["no message"]
            raise BadValue(f"lm_eval failed for {', '.join(tasks)}", why=said[-1][:500])
        return scores_of(json.loads(found[-1].read_text(encoding="utf-8")))


def scores_of(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Score]:
    """Returns the metrics in lm-eval's JSON of results."""
    found = []
    for task, figures in results["results"].items():
        counts = results.get("n-samples", {}).get(task, {})
        samples = counts.get("effective", 0)
        for key, value in figures.items():
            name, _, chosen = key.partition(",")
            if not isinstance(value, int | float) or not chosen or name.endswith("_stderr"):
                continue
            error = figures.get(f"{name}_stderr,{chosen}")
            metric = name if chosen == "none" else f"{name} ({chosen})"
            found.append(
                Score(
                    task,
                    metric,
                    float(value),
                    float(error) if isinstance(error, int | float) else None,
                    int(samples),
                )
            )
    return found
