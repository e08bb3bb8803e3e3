"""`python -m benchmarks.steps`: the cost of a whole step on this CPU, by weight format and KV format."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.output import OutFile, write_json


def steps(
    quantization: Annotated[
        list[str] | None,
        typer.Option(
            "--quantization",
            help="Weight formats: none, int8, int4; may be repeated, all without.",
            show_default=False,
        ),
    ] = None,
    kv: Annotated[
        bool, typer.Option(help="Measure KV formats at 4096 tokens of context too.")
    ] = True,
    speed: Annotated[bool, typer.Option(help="Measure speed.")] = True,
    quality: Annotated[
        int,
        typer.Option(
            "--quality", min=0, help="Problems whose answers' log-likelihood is measured."
        ),
    ] = 0,
    prompts: Annotated[Path, typer.Option("--prompts", help="GSM8K problems, JSON lines.")] = Path(
        "data/gsm8k/gsm8k_test.jsonl"
    ),
    repeats: Annotated[int, typer.Option("--repeats", min=10, help="Decode steps a case.")] = 20,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads; torch's number if not given.")
    ] = None,
    out: OutFile = None,
) -> None:
    """Time decode steps and a prompt of the demo model, and how much of a step is Python's."""
    from kvant.engine.process import wait_without_spinning
    from kvant.errors import UnknownName
    from kvant.models.quantization import Quantization

    known = {"none": None, **{q.value: q for q in Quantization}}
    names = quantization or list(known)
    for name in names:
        if name not in known:
            raise UnknownName("weight format", name, known, asked_by="--quantization")
    wait_without_spinning()
    import torch

    from benchmarks.cpu_steps import KV_FORMATS, measure_quality, measure_steps, table
    from kvant.measure.facts import command_line, measurement_facts

    if threads is not None:
        torch.set_num_threads(threads)
    weights = [known[name] for name in names]
    judged = []
    for found in measure_quality(weights, prompts, quality) if quality else ():
        judged.append(found)
        sys.stderr.write(
            f"{found.weights}: {found.mean_log_likelihood:.5f} nats a token, "
            f"{found.num_tokens} tokens\n"
        )
    rows = []
    formats = KV_FORMATS if kv else ()
    for row in measure_steps(weights if speed else (), formats, repeats=repeats):
        rows.append(row)
        sys.stderr.write(
            f"{row.weights}, KV {row.kv}, {row.case}: {row.tokens_per_second:.1f} tokens/s\n"
        )
    if speed:
        sys.stdout.write(table(rows) + "\n")
    if out is not None:
        command = command_line("python -m benchmarks.steps")
        facts = measurement_facts(command, ("torch", "transformers", "numba"))
        facts |= {"threads": torch.get_num_threads(), "steps": [asdict(row) for row in rows]}
        facts |= {"quality": [asdict(found) for found in judged]}
        write_json(out, facts)


if __name__ == "__main__":
    run_command(steps)
