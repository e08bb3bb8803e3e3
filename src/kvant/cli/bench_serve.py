"""`kvant bench serve`: measures running servers under an open load, at one rate after another."""

from __future__ import annotations

import asyncio
import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.cli.output import OutFile, write_json
from kvant.cli.progress import OnProgress, work

if TYPE_CHECKING:
    from kvant.measure.servers import Server
    from kvant.measure.serving import Load, Round


def serve(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]URL..",
            help="Such as http://127.0.0.1:8000; several are measured turn by turn.",
        ),
    ],
    rates: Annotated[
        list[float] | None,
        typer.Option(
            "--rate",
            metavar="NUMBER",
            min=0.01,
            help="Requests per second; may be repeated. Default: 4.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Seconds in which requests arrive.")
    ] = 30.0,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Tokens of a prompt.")] = 512,
    output_tokens: Annotated[
        int, typer.Option("--output", min=2, help="Tokens of an answer.")
    ] = 128,
    aborts: Annotated[
        float,
        typer.Option("--aborts", min=0, max=1, help="Share of clients that leave before the end."),
    ] = 0.0,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=0, help="Requests before anything is measured.")
    ] = 2,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", min=2, help="Token ids of prompts are smaller than this.")
    ] = 32000,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Name of the model. Default: the first that the server lists."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Key that the servers require."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of prompts and arrivals.")] = 0,
    out: OutFile = None,
) -> None:
    """Measure time to first token and between tokens over HTTP.

    Requests arrive at a given rate. Works with any server with OpenAI's API. With several servers, the
    first one's times are compared with the others'.
    """
    from kvant.measure.facts import command_line, gpu_facts, measurement_facts
    from kvant.measure.servers import parse_servers, ratios, rounds_of, table
    from kvant.measure.serving import Load

    servers = parse_servers(urls, model, api_key)
    loads = [
        Load(rate, seconds, input_tokens, output_tokens, aborts, vocabulary)
        for rate in rates or [4.0]
    ]
    found = asyncio.run(_all(servers, loads, warm_up, seed))
    sys.stdout.write("\n\n".join(filter(None, (table(found), ratios(found)))) + "\n")
    for server, one in found:
        for line in one.failures:
            sys.stderr.write(f"failed at {server.name}: {line}\n")
        if one.server:
            shown = ", ".join(f"{name} {value:g}" for name, value in one.server.items())
            sys.stderr.write(f"{server.name}, at {one.load.rate:g} requests/s: {shown}\n")
    if out is not None:
        words = [word.replace(api_key, "..") if api_key else word for word in sys.argv[1:]]
        command = command_line("kvant", words)
        facts = {**measurement_facts(command, ["h11"]), **gpu_facts(), "servers": rounds_of(found)}
        write_json(out, facts)


async def _all(
    servers: list[Server], loads: list[Load], warm_up: int, seed: int
) -> list[tuple[Server, Round]]:
    from kvant.measure.servers import run_all

    found = []
    total = len(servers) * math.ceil(sum(load.seconds for load in loads))
    with work("measuring", "seconds of load") as on_progress:
        clock = asyncio.create_task(_tick(on_progress, total))
        try:
            async for server, one in run_all(servers, loads, warm_up_requests=warm_up, seed=seed):
                found.append((server, one))
                rate = f"{one.output_tokens_per_second:.0f} tokens/s"
                sys.stderr.write(f"{server.name}, {one.load.rate:g} requests/s: {rate}\n")
        finally:
            clock.cancel()
    return found


async def _tick(on_progress: OnProgress, total: int) -> None:
    """Reports the seconds that pass, up to `total`. Answers to the last requests may take longer."""
    for second in range(total):
        on_progress(second, total)
        await asyncio.sleep(1)
