"""The ASGI application and its one table of routes.

`kvant.server.openapi`, the metrics' labels and the guard read the same table.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from kvant import __version__
from kvant.errors import RequestError
from kvant.server import wire
from kvant.server.answers import EventStream, Shape, unless_disconnected
from kvant.server.api_error import ApiError, Disconnected, bad_request, internal, of_request
from kvant.server.guard import App, Guard, Receive, Scope, Send, header, read_body, with_cors
from kvant.server.requests import (
    Generation,
    check_model,
    check_tokens,
    conversation,
    parse,
    read_chat,
    read_completion,
    refuse_tokenize_extras,
)
from kvant.server.service import Service

_log = logging.getLogger(__name__)
_CLIENT_LEFT = 499
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_LARGE = 128 * 2**10
_Read = TypeVar("_Read")


@dataclass(slots=True)
class Call:
    """One HTTP request. key: its API key. request_id: the client's X-Request-Id.

    counted: numbers for the request log, set by the handler.
    """

    service: Service
    scope: Scope
    receive: Receive
    key: str | None = None
    request_id: bytes | None = None
    counted: dict[str, object] = field(default_factory=dict)

    async def read(self, read: Callable[[bytes], _Read]) -> _Read:
        """Returns the body, read by a function. A large body is read in a thread, so that the event loop
        gets its turns.
        """
        limits = self.service.config.limits
        data = await read_body(self.scope["headers"], self.receive, limits)
        return read(data) if len(data) < _LARGE else await asyncio.to_thread(read, data)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table. answer: the type of its JSON, or None for text. event: of a stream.

    errors: the statuses that only this endpoint has. not_now: status 503 has the answer's own type.
    generates: it takes places in the engine, so a full server refuses it before it reads the body.
    is_open: it needs no key. "{model}" at the end of a path stands for the rest of it.
    """

    method: str
    path: str
    summary: str
    handle: Callable[[Call], Awaitable[Response]]
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    not_now: bool = False
    generates: bool = False
    is_open: bool = False


# -- generating --------------------------------------------------------------------------------


async def _chat(call: Call) -> Response:
    service = call.service
    limits = service.config.limits
    generation = await call.read(lambda data: read_chat(data, limits, service.require()))
    return await _generate(call, generation, chat=True)


async def _complete(call: Call) -> Response:
    service = call.service
    limits = service.config.limits
    generation = await call.read(lambda data: read_completion(data, limits, service.require()))
    return await _generate(call, generation, chat=False)


async def _generate(call: Call, generation: Generation, *, chat: bool) -> Response:
    service = call.service
    reply = service.require().reply
    shape = Shape(chat, service.config.served_names[0], service.tokenizing, generation, reply)
    if generation.stream:
        running = await service.open(generation, key=call.key, counted=call.counted)
        return EventStream(service, running, shape)

    async def whole() -> Response:
        running = await service.open(generation, key=call.key, counted=call.counted)
        try:
            texts: dict[int, str] = {s.index: "" for s in running.sequences.values()}
            async for news in service.events(running):
                for sequence, piece in news or ():
                    texts[sequence.index] += piece.text
            if generation.sampling.prompt_logprobs is None:
                return _json(shape.whole(running, texts))
            # Up to half a million values: in a thread, so that other requests get their turns.
            return await asyncio.to_thread(lambda: _json(shape.whole(running, texts)))
        finally:
            service.close(running)

    return await unless_disconnected(call.receive, whole())


# -- the model ---------------------------------------------------------------------------------


async def _models(call: Call) -> Response:
    call.service.require()
    names = call.service.config.served_names
    return _json(wire.ModelList(data=[_card(call.service, name) for name in names]))


async def _model(call: Call) -> Response:
    name = call.scope["path"].removeprefix("/v1/models/")
    check_model(name, call.service.require())
    return _json(_card(call.service, name))


def _card(service: Service, name: str) -> wire.ModelCard:
    ready = service.supervisor.ready
    assert ready is not None
    return wire.ModelCard(
        id=name,
        created=service.started,
        root=ready.model,
        max_model_len=ready.max_model_len,
        kv_cache=_stored(service),
    )


def _stored(service: Service) -> wire.StoredKV:
    ready = service.supervisor.ready
    assert ready is not None
    return wire.StoredKV(
        ready.stored_as, ready.bytes_per_token, ready.capacity_tokens, ready.page_size
    )


async def _plan(call: Call) -> Response:
    call.service.require()
    ready = call.service.supervisor.ready
    assert ready is not None
    return Response(ready.plan, media_type="application/json")


async def _tokenize(call: Call) -> Response:
    given, raw = await call.read(lambda data: parse(data, wire.TokenizeBody))
    return await unless_disconnected(call.receive, _tokens_of(call.service, given, raw))


async def _tokens_of(service: Service, given: wire.TokenizeBody, raw: dict[str, Any]) -> Response:
    facts = service.require()
    check_model(given.model, facts)
    refuse_tokenize_extras(raw)
    if (given.prompt is None) == (given.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if service.tokenizing is None:
        raise bad_request("this model has no tokenizer", "prompt")
    try:
        if given.messages is not None:
            talk = conversation(given, raw, facts)
            special = given.add_special_tokens is True
            tokens = list((await service.encode_chat(talk, special=special))[0])
        else:
            tokens = await asyncio.to_thread(
                service.tokenizing.encode,
                given.prompt or "",
                add_special_tokens=given.add_special_tokens is not False,
            )
    except RequestError as fault:
        raise of_request(fault) from None
    body = wire.Tokens(len(tokens), facts.max_model_len, tokens)
    if given.return_token_strs:
        backend = service.tokenizing.backend
        body.token_strs = [backend.id_to_token(token) for token in tokens]
    return _json(body)


async def _detokenize(call: Call) -> Response:
    given, _ = await call.read(lambda data: parse(data, wire.DetokenizeBody))
    facts = call.service.require()
    check_model(given.model, facts)
    check_tokens(given.tokens, "tokens", facts)
    if call.service.tokenizing is None:
        raise bad_request("this model has no tokenizer", "tokens")
    # As a batch of one: only then the library releases the interpreter.
    decode = call.service.tokenizing.backend.decode_batch
    (text,) = await asyncio.to_thread(decode, [given.tokens], skip_special_tokens=False)
    return _json(wire.Text(text))


async def _tokenizer_info(call: Call) -> Response:
    facts = call.service.require()
    if call.service.tokenizing is None:
        raise ApiError(404, "this model has no tokenizer")
    tokenizer = call.service.tokenizing.tokenizer
    special = tokenizer.special_tokens_map
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return _json(
        wire.TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            chat_template=facts.template,
            **{name: str(special[name]) if name in special else None for name in names},
            vocab_size=len(tokenizer),
        )
    )


# -- the server --------------------------------------------------------------------------------


async def _health(call: Call) -> Response:
    return _state(call.service, call.service.alive)


async def _ready(call: Call) -> Response:
    return _state(call.service, call.service.accepting)


def _state(service: Service, good: bool) -> Response:
    state = "draining" if service.draining else service.supervisor.state.value
    headers = None if good else {"retry-after": "2"}
    return _json({"status": state}, 200 if good else 503, headers)


async def _load(call: Call) -> Response:
    return _json(wire.Load(call.service.admission.held))


async def _version(call: Call) -> Response:
    return _json(wire.Version(__version__))


async def _server_info(call: Call) -> Response:
    facts = call.service.require()
    ready = call.service.supervisor.ready
    assert ready is not None
    return _json(
        wire.ServerInfo(
            __version__,
            list(facts.names),
            ready.model,
            ready.revision,
            ready.fingerprint,
            ready.max_model_len,
            ready.max_num_seqs,
            ready.vocab_size,
            _stored(call.service),
        )
    )


async def _metrics(call: Call) -> Response:
    return Response(call.service.metrics.text(), media_type="text/plain; version=0.0.4")


async def _openapi(call: Call) -> Response:
    from kvant.server.openapi import document  # describes this table

    config = call.service.config
    facts = call.service.facts
    return _json(document(ENDPOINTS, config.limits, facts, has_keys=bool(config.api_keys)))


_GENERATES = (400, 404, 413, 429, 503)
_READS = (400, 404, 413, 503)

ENDPOINTS = (
    Endpoint(
        "POST", "/v1/chat/completions", "Answer a conversation", _chat, wire.ChatCompletion,
        wire.ChatBody, wire.ChatCompletionChunk, _GENERATES, generates=True,
    ),
    Endpoint(
        "POST", "/v1/completions", "Complete texts or token ids", _complete, wire.Completion,
        wire.CompletionBody, wire.CompletionChunk, _GENERATES, generates=True,
    ),
    Endpoint("GET", "/v1/models", "The served models", _models, wire.ModelList, errors=(503,)),
    Endpoint(
        "GET", "/v1/models/{model}", "One served model", _model, wire.ModelCard, errors=(404, 503)
    ),
    Endpoint("GET", "/v1/kv/plan", "The JSON of `kvant plan`", _plan, wire.Plan, errors=(503,)),
    Endpoint(
        "POST", "/tokenize", "Token ids of a text or conversation", _tokenize, wire.Tokens,
        wire.TokenizeBody, errors=_READS,
    ),
    Endpoint(
        "POST", "/detokenize", "Text of token ids", _detokenize, wire.Text, wire.DetokenizeBody,
        errors=_READS,
    ),
    Endpoint(
        "GET", "/tokenizer_info", "The tokenizer and its chat template", _tokenizer_info,
        wire.TokenizerInfo, errors=(404, 503),
    ),
    Endpoint(
        "GET", "/health", "Whether the engine runs", _health, wire.State, not_now=True, is_open=True
    ),
    Endpoint("GET", "/ping", "The same", _health, wire.State, not_now=True),
    Endpoint("POST", "/ping", "The same", _health, wire.State, not_now=True),
    Endpoint("GET", "/ready", "Whether requests are accepted", _ready, wire.State, not_now=True),
    Endpoint("GET", "/load", "Sequences that run or wait", _load, wire.Load),
    Endpoint("GET", "/metrics", "Prometheus metrics", _metrics, None),
    Endpoint("GET", "/version", "The version", _version, wire.Version),
    Endpoint(
        "GET", "/server_info", "The model and its limits", _server_info, wire.ServerInfo,
        errors=(503,),
    ),
    Endpoint("GET", "/openapi.json", "This document", _openapi, wire.Document),
)  # fmt: skip

_BY_PATH: dict[str, dict[str, Endpoint]] = {}
for _endpoint in ENDPOINTS:
    _BY_PATH.setdefault(_endpoint.path, {})[_endpoint.method] = _endpoint
_OPEN = "{model}"


def _route(path: str) -> str | None:
    """The path of the table that a request's path belongs to."""
    if path in _BY_PATH:
        return None if path.endswith(_OPEN) else path
    for known in _BY_PATH:
        if known.endswith(_OPEN) and len(path) >= len(known) - len(_OPEN):
            before = known.removesuffix(_OPEN)
            if path.startswith(before) and path != before:
                return known
    return None


# -- the application ---------------------------------------------------------------------------


def make_app(service: Service) -> App:
    """The ASGI application of a server."""
    return with_cors(_Application(service), service.config.allowed_origins)


class _Application:
    """Checks, routes and answers; turns every failure into an error in the common shape; counts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._guard = Guard(service.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no websockets: uvicorn answers 403
        started = time.monotonic()
        call = Call(self._service, scope, receive)
        given = header(scope["headers"], b"x-request-id")
        if given is not None and _ID.fullmatch(given):
            call.request_id = given
        status = 0

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if call.request_id is not None:
                    own = (b"x-request-id", call.request_id)
                    message = {**message, "headers": [*message["headers"], own]}
            await send(message)

        route = _route(scope["path"])
        try:
            response = await self._answer(call, route)
            await response(scope, receive, watched)
        except Exception:
            _log.exception("a request failed")
            if status == 0:
                await _error(internal())(scope, receive, watched)
        finally:
            if status:
                self._service.metrics.answered(route or "other", status)
                if self._service.config.log_requests:
                    self._note(call, route or "other", status, time.monotonic() - started)

    async def _answer(self, call: Call, route: str | None) -> Response:
        """The response of the route, or of what went wrong before it was sent."""
        endpoints = _BY_PATH.get(route or "", {})
        endpoint = endpoints.get(call.scope["method"])
        try:
            call.key = self._guard.check(
                call.scope, is_open=any(one.is_open for one in endpoints.values())
            )
            if endpoint is not None and endpoint.generates:
                self._service.refuse_if_full()
        except ApiError as fault:
            return _unread(fault)
        try:
            if endpoint is not None:
                return await endpoint.handle(call)
            if endpoints:
                allow = {"allow": ", ".join(sorted(endpoints))}
                return _error(ApiError(405, "this endpoint has no such method"), allow)
            return _error(ApiError(404, "there is no such endpoint"))
        except ApiError as fault:
            # The rest of a body that is too large is not read: the connection cannot be used again.
            return _unread(fault) if fault.status == 413 else _error(fault)
        except Disconnected:
            return Response(status_code=_CLIENT_LEFT)  # it is counted, but not read
        except Exception:
            _log.exception("a request failed")
            return _error(internal())

    def _note(self, call: Call, route: str, status: int, seconds: float) -> None:
        """One line of the request log, without contents."""
        own = "-" if call.request_id is None else call.request_id.decode()
        counted = "".join(f" {name}={value}" for name, value in call.counted.items())
        method = call.scope["method"] if route != "other" else "-"
        self._service.say(
            f"kvant: request {method} {route} {status} id={own} seconds={seconds:.3f}{counted}"
        )


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _error(fault: ApiError, headers: dict[str, str] | None = None) -> Response:
    return _json(fault.body, fault.status, {**fault.headers, **(headers or {})})


def _unread(fault: ApiError) -> Response:
    """A refusal before the body was read. A final one ends the connection. A client that is to try again
    keeps its connection, and its body is dropped as it comes.
    """
    headers = {} if fault.retry_after is not None else {"connection": "close"}
    if fault.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _error(fault, headers)
