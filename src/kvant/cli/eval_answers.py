"""`kvant eval --long-reasoning` and `--tasks`: counts right answers by format, instead of distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvant.cli.measuring import kept_parts, progress
from kvant.cli.output import figure_table
from kvant.cli.progress import tracked
from kvant.kv.names import FormatRequest
from kvant.look import counted

if TYPE_CHECKING:
    from kvant.engine.llm import LLM
    from kvant.kv.request import AskedWide
    from kvant.measure.quality.reasoning import Sampling

TASK_TOKENS = 2048
"""Most tokens of a request of lm-eval; fewer for a model with a shorter context."""


def long_reasoning(
    llm: LLM,
    path: Path,
    baseline: FormatRequest,
    formats: Sequence[FormatRequest],
    rows: AskedWide | None,
    sampling: Sampling,
    count: int | None,
    *,
    restart: bool,
) -> dict[str, Any]:
    """Answers the problems of a file in the baseline and in `formats`. Returns `reasoning.report`.

    rows: wide rows beside each of `formats`. count: the most problems, None for all. restart: discard parts
    of an interrupted run.
    """
    from kvant.measure.own_engine import plan_storing
    from kvant.measure.quality.evaluate import run_parts
    from kvant.measure.quality.reasoning import Reasoning, read_problems, report

    plans = {str(baseline): plan_storing(llm, baseline)}
    plans |= {str(one): plan_storing(llm, one, wide=rows) for one in formats}
    reasoning = Reasoning(llm, plans, read_problems(path, count), sampling)
    kept = kept_parts("eval", reasoning.inputs(), restart=restart)
    with progress(kept) as on_progress:
        parts = run_parts(reasoning.parts(), kept, on_progress)
    kept.forget()
    return report(reasoning, parts)


def print_reasoning(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    sampling = found["sampling"]
    table = figure_table(
        "format", ("B/token", "pass@1", f"minus {found['baseline']}", "tokens", "cut off")
    )
    for name, one in found["formats"].items():
        table.add_row(
            name,
            f"{one['bytes_per_token']:,}",
            _share(one["pass_at_1"], one["pass_at_1_error"]),
            _share(one["against_baseline"], one["against_baseline_error"], signed=True),
            f"{one['mean_tokens']:.0f}",
            f"{one['cut']:.0%}",
        )
    console.print(table)
    needed = [one["problems_for_5_points"] for one in found["formats"].values()]
    most = max((one for one in needed if one), default=None)
    answers = f"{counted(found['problems'], 'problem')}, {counted(sampling['samples'], 'answer')}"
    console.print(
        f"[dim]{answers} each of at most "
        f"{sampling['answer_tokens']} tokens, temperature {sampling['temperature']}, top_p "
        f"{sampling['top_p']}; ±: standard error over problems, differences paired by problem"
        + (f"\na difference of 5 points would need {most:,} problems" if most else "")
        + "[/]"
    )


def _share(value: float, error: float, *, signed: bool = False) -> str:
    shown = f"{value:+.1%}" if signed else f"{value:.1%}"
    return shown if math.isnan(error) else f"{shown} ± {error:.1%}"


def tasks(
    llm: LLM,
    model: str,
    baseline: FormatRequest,
    formats: Sequence[FormatRequest],
    rows: AskedWide | None,
    names: Sequence[str],
    *,
    command: Path,
    include: Path | None,
    limit: int | None,
    dtype: str,
    device: str,
    attention_backend: str,
    overrides: str | None,
) -> dict[str, Any]:
    """Runs lm-eval's tasks against a server for each format, one after another. Returns scores by format.

    rows: wide rows beside each of `formats`. command: lm_eval. Raises BadValue if it fails.
    """
    from kvant.cli.demo_server import served
    from kvant.kv.groups import bytes_per_token_at
    from kvant.measure.own_engine import plan_storing
    from kvant.measure.quality.lm_eval import run_tasks

    longest = llm.planned.target.geometry.max_model_len or TASK_TOKENS
    length = min(longest, TASK_TOKENS)
    formats_found: dict[str, Any] = {}
    for one in tracked((baseline, *formats), 1 + len(formats), "lm-eval", "formats"):
        kept = rows if formats_found else None  # the baseline comes first, and has none
        plan = plan_storing(llm, one, wide=kept)
        size = bytes_per_token_at(plan, length)
        flags = (
            "--dtype", dtype, "--device", device, "--kv-cache-dtype", str(one),
            "--max-model-len", str(length), "--max-num-seqs", "8",
            "--attention-backend", attention_backend,
            "--kv-cache-memory", str(round(8 * (length + 64) * max(size, plan.bytes_per_token))),
            *_row_flags(kept),
            *(() if overrides is None else ("--hf-overrides", overrides)),
            # lm-eval gives up on a refusal, so all its requests may wait.
            "--max-num-queued-tokens", str(32 * length),
        )  # fmt: skip
        with served(model, flags) as port:
            scores = run_tasks(
                command, port=port, model=model, tokenizer=llm.model_path, tasks=names, include=include,
                limit=limit, max_length=length,
            )  # fmt: skip
        formats_found[str(one)] = {
            "bytes_per_token": round(size),
            "scores": [
                {
                    "task": score.task,
                    "metric": score.metric,
                    "value": score.value,
                    "error": score.error,
                    "samples": score.samples,
                    "samples_for_5_points": score.samples_needed,
                }
                for score in scores
            ],
        }
    return {
        "schema": 1,
        "model": llm.plan.model,
        "baseline": str(baseline),
        "formats": formats_found,
    }


def _row_flags(rows: AskedWide | None) -> tuple[str, ...]:
    """Returns the server's flags for wide rows."""
    if rows is None:
        return ()
    return (
        "--kv-recent-tokens", str(rows.recent), "--kv-sink-tokens", str(rows.sink), "--kv-recent-dtype",
        str(rows.format),
    )  # fmt: skip


def print_tasks(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    names = list(found["formats"])
    table = figure_table("task, metric", (*names, "for 5 points"))
    for row in zip(*(found["formats"][name]["scores"] for name in names), strict=True):
        needed = [one["samples_for_5_points"] for one in row]
        table.add_row(
            f"{row[0]['task']}, {row[0]['metric']}",
            *(_score(one["value"], one["error"]) for one in row),
            f"{max(one for one in needed if one):,}" if any(needed) else "-",
        )
    console.print(table)
    samples = sorted({one["samples"] for name in names for one in found["formats"][name]["scores"]})
    console.print(
        f"[dim]{', '.join(map(str, samples))} documents; ±: standard error as lm-eval gives it; "
        "for 5 points: documents that a difference of 5 points would need in each format[/]"
    )


def _score(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"
