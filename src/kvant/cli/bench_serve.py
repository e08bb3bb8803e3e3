"""`kvant bench serve`: a running server under an open load, at several rates one after another."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvant.measure.http_stream import Target
    from kvant.measure.serving import Load, Round


def serve(
    url: Annotated[str, typer.Argument(help="Such as http://127.0.0.1:8000; any such server.")],
    rates: Annotated[
        list[float] | None,
        typer.Option("--rate", min=0.01, help="Requests a second; may be repeated. Default: 4."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Of arrivals.")] = 30.0,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Tokens a prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option("--output", min=2, help="An answer.")] = 128,
    aborts: Annotated[
        float, typer.Option("--aborts", min=0, max=1, help="Share of clients that leave.")
    ] = 0.0,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=0, help="Requests before anything is measured.")
    ] = 2,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", min=2, help="Token ids of prompts lie below.")
    ] = 32000,
    model: Annotated[
        str | None, typer.Option("--model", help="Default: the first the server names.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="File for the result as JSON.")] = None,
) -> None:
    """Time to first token and between tokens over HTTP; requests arrive whether others are answered or
    not.
    """
    from kvant.measure.facts import gpu_facts, measurement_facts
    from kvant.measure.http_stream import parse_target
    from kvant.measure.serving import Load, table

    target = parse_target(url, api_key)
    loads = [
        Load(rate, seconds, input_tokens, output_tokens, aborts, vocabulary)
        for rate in rates or [4.0]
    ]
    rounds = asyncio.run(_all(target, model, loads, warm_up, seed))
    sys.stdout.write(table(rounds) + "\n")
    for one in rounds:
        for line in one.failures:
            sys.stderr.write(f"failed: {line}\n")
        if one.server:
            shown = ", ".join(f"{name} {value:g}" for name, value in one.server.items())
            sys.stderr.write(f"the server, at {one.load.rate:g} requests/s: {shown}\n")
    if out is not None:
        words = [word.replace(api_key, "..") if api_key else word for word in sys.argv[1:]]
        command = shlex.join(["kvant", *words])
        facts = {**measurement_facts(command, ["h11"]), **gpu_facts()}
        rows = [
            {**asdict(one), "output_tokens_per_second": one.output_tokens_per_second}
            for one in rounds
        ]
        out.write_text(json.dumps({**facts, "rounds": rows}, indent=1) + "\n", encoding="utf-8")


async def _all(
    target: Target, model: str | None, loads: list[Load], warm_up: int, seed: int
) -> list[Round]:
    from kvant.measure.serving import model_of, run_all

    name = model or await model_of(target)
    found = []
    async for one in run_all(target, name, loads, warm_up=warm_up, seed=seed):
        found.append(one)
        sys.stderr.write(f"{one.load.rate:g} requests/s: {one.output_tokens_per_second:.0f}\n")
    return found
