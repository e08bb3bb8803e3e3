"""Endpoints for routers in front of servers: the load, and a request's token ids for prefix affinity."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.responses import Response

from kvant import __version__
from kvant.server import wire
from kvant.server.answers import Call, as_json, unless_disconnected
from kvant.server.requests import Generation, read_chat, read_completion


async def loads(call: Call) -> Response:
    """Answers with the load, in the form of SGLang's workers, as one data-parallel rank."""
    facts, service = call.service.require(), call.service
    stats, ready = service.supervisor.stats, service.ready
    waiting = max(stats.num_waiting, service.admission.held - stats.num_running)
    used = stats.num_held_pages / stats.num_usable_pages if stats.num_usable_pages else 0.0
    load = wire.RankLoad(
        dp_rank=0,
        num_running_reqs=stats.num_running,
        num_waiting_reqs=waiting,
        num_waiting_uncached_tokens=service.admission.queued_tokens,
        num_total_reqs=stats.num_running + waiting,
        num_used_tokens=int(used * ready.capacity_tokens),
        max_total_num_tokens=ready.capacity_tokens,
        token_usage=used,
        utilization=stats.num_running / ready.max_num_seqs,
        max_running_requests=ready.max_num_seqs,
    )
    now = datetime.now(UTC).isoformat()
    return as_json(wire.Loads(now, __version__, next(iter(facts.names)), 1, [load]))


async def render_chat(call: Call) -> Response:
    """Answers with the token ids of a conversation's prompt. Nothing is generated."""
    limits = call.service.config.limits
    generation = await call.read(lambda data: read_chat(data, limits, call.service.require()))
    (found,) = await unless_disconnected(call.receive, _rendered(call, generation))
    return as_json(found)


async def render_completion(call: Call) -> Response:
    """Answers with a list of the token ids of each prompt of a completion."""
    limits = call.service.config.limits
    generation = await call.read(lambda data: read_completion(data, limits, call.service.require()))
    return as_json(await unless_disconnected(call.receive, _rendered(call, generation)))


async def _rendered(call: Call, generation: Generation) -> list[wire.Rendered]:
    service = call.service
    prompts, _ = await service.tokenise(generation, service.require())
    name = service.config.served_names[0]
    return [wire.Rendered(name, list(tokens)) for tokens in prompts]
