"""The endpoints of /v1/messages."""

from __future__ import annotations

from starlette.responses import Response

from kvant.errors import RequestError
from kvant.server.answers import Call, as_json, generate, unless_disconnected
from kvant.server.anthropic.read import read_count, read_messages
from kvant.server.anthropic.wire import InputTokens
from kvant.server.anthropic.write import MessageWriter
from kvant.server.api_error import of_request


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
    assert generation.conversation is not None
    try:
        work = service.encode_chat(generation.conversation)
        tokens, _ = await unless_disconnected(call.receive, work)
    except RequestError as fault:
        raise of_request(fault) from None
    return as_json(InputTokens(len(tokens)))
