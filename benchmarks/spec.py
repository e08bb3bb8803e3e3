"""`python -m benchmarks.spec`: the gain of speculation on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.configured import configured
from kvant.cli.output import OutFile, write_json
from kvant.plan.config import EngineOptions, engine_config
from kvant.plan.settings import Settings

DEFAULT_DRAFTER = {"method": "dflash", "model": "smollm2-dflash"}
DEFAULT_PROMPTS = Path("data/gsm8k/gsm8k_test.jsonl")


@configured(EngineOptions, model="--model -m")
def spec(
    settings: Settings,
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            "--pair",
            metavar="TARGET:DRAFT",
            help="KV formats of target and drafter, such as fp8:bf16; may be repeated.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path, typer.Option("--prompts", help="JSON lines with a question or a prompt each.")
    ] = DEFAULT_PROMPTS,
    count: Annotated[int, typer.Option("--count", min=1, help="Prompts.")] = 20,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="New tokens at most, for each prompt.")
    ] = 128,
    out: OutFile = None,
) -> None:
    """Tokens a second with and without drafts, and how many of these stand, by position.

    One prompt at a time, greedy, in the model's chat template. Without --speculative-config the demo
    model's drafter.
    """
    from benchmarks.speculation import FormatPair, compare, parse_pair, read_prompts, table
    from kvant.plan.speculative_config import parse_speculative_config

    config = engine_config(settings, num_requests=1)
    asked = config.plan.speculative or parse_speculative_config(DEFAULT_DRAFTER)
    wanted = [parse_pair(text, asked_by="--pair") for text in pairs or ()] or [FormatPair()]
    texts = read_prompts(prompts, count)
    rows = []
    for row in compare(config, asked, wanted, texts, max_tokens):
        rows.append(row)
        sys.stderr.write(f"{row.target} with {row.draft} drafts: {row.speedup:.2f}x\n")
    sys.stdout.write(table(rows) + "\n")
    if out is not None:
        import torch

        from kvant.measure.facts import command_line, measurement_facts

        facts = {
            **measurement_facts(command_line("python -m benchmarks.spec"), ["torch"]),
            "model": config.plan.model,
            "speculative": asked.model or asked.method.name,
            "prompts": str(prompts),
            "max_tokens": max_tokens,
            "threads": torch.get_num_threads(),
            "rows": [row.as_json() for row in rows],
        }
        write_json(out, facts)


if __name__ == "__main__":
    run_command(spec)
