"""Runs several servers under the same loads, one after another, and compares them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict, dataclass

from kvant.errors import BadValue
from kvant.measure.http_stream import Target, parse_target
from kvant.measure.serving import OUTCOMES, Load, Percentiles, Round, run, warm_up


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure. name: in tables. model: None for the first model that it lists."""

    name: str
    target: Target
    model: str | None = None


Found = Sequence[tuple[Server, Round]]


def parse_servers(
    texts: Sequence[str], model: str | None = None, api_key: str | None = None
) -> list[Server]:
    """Parses `NAME=URL`, or a URL, whose name is host and port. Raises BadValue if a name occurs twice."""
    found = []
    for text in texts:
        name, _, url = text.rpartition("=") if "=" in text.partition("://")[0] else ("", "", text)
        target = parse_target(url, api_key)
        found.append(Server(name or target.authority, target, model))
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise BadValue(f"two servers are called {name}", why="their figures would be mixed up")
    return found


async def run_all(
    servers: Sequence[Server], loads: Sequence[Load], *, warm_up_requests: int, seed: int
) -> AsyncGenerator[tuple[Server, Round], None]:
    """Offers each load to one server after another, with the same prompts at the same moments.

    No server gets a prompt twice, so prefix caches have no hits. While one server is measured, the
    others are idle but keep their memory.
    """
    for server in servers:
        await warm_up(server.target, server.model, loads[0], warm_up_requests, seed=seed)
    for number, load in enumerate(loads):
        for server in servers:
            yield server, await run(server.target, server.model, load, seed=f"{seed} {number}")


def rounds_of(found: Found) -> list[dict[str, object]]:
    """Returns each server's rounds for JSON, in the order in which the servers were named."""
    servers = list(dict.fromkeys(server for server, _ in found))
    return [
        {
            "name": server.name,
            "address": server.target.authority,
            "rounds": [
                {**asdict(one), "output_tokens_per_second": one.output_tokens_per_second}
                for other, one in found
                if other == server
            ],
        }
        for server in servers
    ]


def table(found: Found) -> str:
    """Formats results as Markdown, in milliseconds."""
    lines = [
        "| requests/s | server | input/output | completed, aborted, refused, failed | out tok/s "
        "| TTFT p50 | p90 | p99 | ITL p50 | p90 | p99 | TPOT p50 | end to end p50 |",
        "|" + "---|" * 13,
    ]
    for server, one in found:
        load = one.load
        counts = ", ".join(str(one.outcomes[name]) for name in OUTCOMES)
        cells = [*_cells(one.ttft), *_cells(one.itl), *_cells(one.tpot)[:1], *_cells(one.e2e)[:1]]
        lines.append(
            f"| {load.rate:g} | {server.name} | {load.input}/{load.output} | {counts} "
            f"| {one.output_tokens_per_second:.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def ratios(found: Found) -> str:
    """Formats the first server's times over each other server's at the same load; "" for one server."""
    first = found[0][0]
    others = [(server, one) for server, one in found if server != first]
    if not others:
        return ""
    own = {one.load: one for server, one in found if server == first}
    lines = [
        f"| {first.name} over | requests/s | {' | '.join(_TIMES)} |",
        "|" + "---|" * (2 + len(_TIMES)),
    ]
    for server, one in others:
        cells = [_ratio(time(own[one.load]), time(one)) for time in _TIMES.values()]
        lines.append(f"| {server.name} | {one.load.rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a is not None and b else "-"


def _of(times: Percentiles | None, share: str) -> float | None:
    return None if times is None else float(getattr(times, share))


_TIMES: dict[str, Callable[[Round], float | None]] = {
    "TTFT p50": lambda one: _of(one.ttft, "p50"),
    "TTFT p99": lambda one: _of(one.ttft, "p99"),
    "ITL p50": lambda one: _of(one.itl, "p50"),
    "ITL p99": lambda one: _of(one.itl, "p99"),
    "end to end p50": lambda one: _of(one.e2e, "p50"),
}


def _cells(found: Percentiles | None) -> list[str]:
    if found is None:
        return ["-", "-", "-"]
    return [f"{1e3 * seconds:.1f}" for seconds in (found.p50, found.p90, found.p99)]
