"""`python -m benchmarks.replay`: speculation with random weights and replayed acceptance."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from benchmarks.command import run_command
from kvant.cli.configured import configured
from kvant.cli.output import OutFile, write_json
from kvant.errors import BadValue
from kvant.plan.config import EngineOptions, engine_config
from kvant.plan.settings import Settings

_OWN = ("kv_cache_dtype", "enable_prefix_caching", "seed")


@configured(EngineOptions, model="--model -m", without=_OWN)
def replay(
    settings: Settings,
    requests: Annotated[
        list[int] | None,
        typer.Option("--requests", min=1, help="Sequences at once; may be repeated."),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of a prompt.")] = 128,
    output: Annotated[
        int, typer.Option("--output", min=1, help="Tokens of each request that are timed.")
    ] = 256,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=1, help="Tokens of each request before that.")
    ] = 200,
    formats: Annotated[
        list[str] | None,
        typer.Option("--kv-format", help="KV cache format; may be repeated.", show_default=False),
    ] = None,
    mean: Annotated[
        float, typer.Option("--mean", min=1.0, help="Tokens a step of a whole block, on average.")
    ] = 6.4,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    plain: Annotated[bool, typer.Option(help="Plain decoding beside it.")] = True,
    written: Annotated[
        bool, typer.Option("--written", help="Do not run prompts: write random keys and values.")
    ] = False,
    out: OutFile = None,
) -> None:
    """Tokens per second of steady decoding, with drafts accepted as often as --mean says, and without.

    Drafter and verifier do all their work; accepted drafts are drawn beforehand. For models with
    random weights (--load-format dummy), whose drafts would never be accepted.
    """
    from benchmarks.replay_rounds import Load, measure, table
    from kvant.measure.facts import command_line, measurement_facts

    config = engine_config(settings)
    config = replace(config, plan=replace(config.plan, prefix_caching=written), seed=0)
    asked = config.plan.speculative
    if asked is None or not asked.model:
        raise BadValue(
            "this benchmark needs a drafter",
            why='give --speculative-config \'{"method":"dflash","model":DIRECTORY}\'',
        )
    asked = replace(asked, options={"hundredths_of_mean": round(100 * mean), "seed": 1})
    loads = [Load(count, context, output, warm_up) for count in requests or [1, 8]]
    found = []
    for one in measure(
        config, asked, formats or ["auto"], loads, repeats, plain=plain, written=written
    ):
        found.append(one)
        sys.stderr.write(
            f"{one.stored} {one.requests} x {one.input}, {one.num_drafts} drafts: "
            f"{one.tokens_per_second:.0f} tok/s, {one.mean_length:.2f} tokens a step\n"
        )
    sys.stdout.write(table(found) + "\n")
    if out is not None:
        facts = measurement_facts(
            command_line("python -m benchmarks.replay"), ["torch", "transformers"]
        )
        body = {**facts, "mean": mean, "rows": [asdict(one) for one in found]}
        write_json(out, body)


if __name__ == "__main__":
    run_command(replay)
