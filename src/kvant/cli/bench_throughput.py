"""`kvant bench throughput`: measures many requests at once, with one format after another."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from kvant.cli.configured import configured
from kvant.cli.output import OutFile, write_json
from kvant.cli.progress import tracked
from kvant.plan.config import EngineOptions, engine_config
from kvant.plan.settings import Settings

_OWN = ("kv_cache_dtype", "enable_prefix_caching", "seed")


@configured(EngineOptions, model="--model -m", without=_OWN)
def throughput(
    settings: Settings,
    load: Annotated[
        list[str] | None,
        typer.Option(
            "--load",
            metavar="REQUESTSxINPUT/OUTPUT",
            help="Such as 32x128/256; may be repeated. Default: 8x128/64.",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-format", metavar="F", help="KV cache format; may be repeated. Default: auto."
        ),
    ] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            "--sampling",
            metavar="JSON",
            help='How tokens are drawn, such as {"temperature":0.6,"top_k":20,"top_p":0.95}; may be '
            "repeated.",
            show_default="greedy",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Measurements of each load.")
    ] = 2,
    out: OutFile = None,
) -> None:
    """Measure output tokens per second without a server.

    The prefix cache is off.
    """
    from kvant.measure.facts import command_line, measurement_facts
    from kvant.measure.throughput import GREEDY, measure, parse_load, parse_sampling, table

    config = engine_config(settings)
    config = replace(config, plan=replace(config.plan, prefix_caching=False), seed=0)
    loads = [parse_load(text) for text in load or ["8x128/64"]]
    samplings = {text: parse_sampling(text) for text in sampling or []} or GREEDY
    rounds = []
    names = formats or ["auto"]
    total = len(names) * len(loads) * len(samplings)
    measured = measure(config, names, loads, repeats, samplings)
    for found in tracked(measured, total, "measuring", "rounds"):
        rounds.append(found)
        sys.stderr.write(
            f"{found.load} {found.stored}, {found.sampling}: "
            f"{found.output_tokens_per_second:.0f} out tok/s\n"
        )
    sys.stdout.write(table(rounds) + "\n")
    if out is not None:
        facts = measurement_facts(command_line("kvant"), ["torch", "transformers"])
        rows = [{**asdict(found), "load": str(found.load)} for found in rounds]
        write_json(out, {**facts, "rounds": rows})
