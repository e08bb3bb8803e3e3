"""The endpoints of /v1/messages."""

from __future__ import annotations

from starlette.responses import Response

from kvant.server.answers import Call, as_json, generate, num_prompt_tokens
from kvant.server.anthropic.read import read_count, read_messages
from kvant.server.anthropic.wire import InputTokens
from kvant.server.anthropic.write import MessageWriter


async def message(call: Call) -> Response:
    service = call.service
    limits = service.config.limits
    generation = await call.read(lambda data: read_messages(data, limits, service.require()))
    writer = MessageWriter(generation, service.config.served_names[0], service.require().reply)
    return await generate(call, writer, key=call.key)


async def count_tokens(call: Call) -> Response:
    service = call.service
    limits = service.config.limits
    generation = await call.read(lambda data: read_count(data, limits, service.require()))
    return as_json(InputTokens(await num_prompt_tokens(call, generation)))
