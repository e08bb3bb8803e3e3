"""The endpoints of /v1/responses."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.responses import Response

from kvant.server.answers import Call, as_json, finished, generate, num_prompt_tokens
from kvant.server.api_error import ApiError, bad_request, internal
from kvant.server.responses.read import Asked, Message, parse_response, read_response
from kvant.server.responses.wire import Deleted, InputItems, ResponseInputTokens
from kvant.server.responses.write import ResponseWriter
from kvant.server.service import Running, Service
from kvant.server.store import Stored

_log = logging.getLogger(__name__)
_Task = asyncio.Task[None]


async def respond(call: Call) -> Response:
    service = call.service
    facts = service.require()
    asked, history = await _asked(call)
    name = service.config.served_names[0]
    writer = ResponseWriter(asked, name, facts.reply, service.tokenizing)
    if not asked.keeps:
        return await generate(call, writer, key=call.key)
    conversation = [*history, *asked.messages]
    items = msgspec.json.encode(asked.items)
    writer.on_end = lambda: _keep(writer, call, conversation, items, None)
    if not asked.body.background:
        return await generate(call, writer, key=call.key)
    running = await service.open(asked.generation, key=call.key, counted=call.counted)
    task = asyncio.create_task(_in_background(service, running, writer))
    _keep(writer, call, conversation, items, task)
    return as_json(writer.answer)


async def count_input(call: Call) -> Response:
    asked, _ = await _asked(call)
    return as_json(ResponseInputTokens(await num_prompt_tokens(call, asked.generation)))


async def _asked(call: Call) -> tuple[Asked, list[Message]]:
    """What a body asks for, and the messages of the responses before it."""
    store, limits = call.service.responses, call.service.config.limits
    body, raw = await call.read(parse_response)
    facts = call.service.require()
    history: list[Message] = []
    if body.previous_response_id is not None:
        name = "previous_response_id"
        before = store.get(body.previous_response_id, call.owner, name)
        if before.task is not None:
            raise bad_request(f"{name}: this response has not ended", name)
        history = await asyncio.to_thread(before.conversation)
    asked = await asyncio.to_thread(
        lambda: read_response(body, raw, history, limits, facts, can_store=store.is_on)
    )
    return asked, history


async def read_stored(call: Call) -> Response:
    if b"stream=true" in call.scope.get("query_string", b""):
        raise bad_request("stream: a stored response is read as a whole", "stream")
    return Response(_stored(call).answer, media_type="application/json")


async def read_input_items(call: Call) -> Response:
    items = msgspec.json.decode(_stored(call).items)
    ids = [item.get("id") for item in items] or [None]
    return as_json(InputItems(data=items, first_id=ids[0], last_id=ids[-1]))


async def delete_response(call: Call) -> Response:
    call.service.require()
    id = _id(call)
    call.service.responses.delete(id, call.owner)
    return as_json(Deleted(id))


async def cancel_response(call: Call) -> Response:
    """Ends a response that runs in the background. An ended one stays as it is, as in OpenAI's API."""
    stored = _stored(call)
    answer = msgspec.json.decode(stored.answer)
    if not answer["background"]:
        raise bad_request("only a response with background true can be cancelled", "id")
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait((stored.task,))
    return Response(_stored(call).answer, media_type="application/json")


def _stored(call: Call) -> Stored:
    call.service.require()
    return call.service.responses.get(_id(call), call.owner)


def _id(call: Call) -> str:
    path: str = call.scope["path"]
    return path.split("/")[3]


def _keep(
    writer: ResponseWriter, call: Call, before: list[Message], items: bytes, task: _Task | None
) -> None:
    """Stores the response in its current state. before: the conversation before it.

    task: the task that still computes it, None if it has ended.
    """
    conversation = [] if task is not None else [*before, *writer.messages()]
    stored = Stored(
        call.owner,
        msgspec.json.encode(writer.answer),
        items,
        msgspec.json.encode(conversation),
        task,
    )
    call.service.responses.put(writer.answer.id, stored)


async def _in_background(service: Service, running: Running, writer: ResponseWriter) -> None:
    try:
        await finished(service, running, writer)
    except ApiError as fault:
        writer.fail(fault)
    except asyncio.CancelledError:
        # A deleted response is not stored again.
        if service.responses.holds(writer.answer.id):
            writer.stop()
    except Exception:
        _log.exception("a response in the background failed")
        writer.fail(internal())
