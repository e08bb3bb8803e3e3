"""The ASGI application and its one table of routes.

`kvant.server.openapi`, the metrics' labels and the guard read the same table.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from kvant import __version__
from kvant.errors import RequestError
from kvant.server import wire
from kvant.server.answers import (
    Call,
    Choices,
    Endpoint,
    as_json,
    generate,
    openai_error,
    unless_disconnected,
)
from kvant.server.anthropic.handle import count_tokens, message
from kvant.server.anthropic.wire import (
    CountBody,
    InputTokens,
    MessagesAnswer,
    MessagesBody,
    MessagesError,
    MessagesEvent,
)
from kvant.server.anthropic.write import error_body
from kvant.server.api_error import ApiError, Disconnected, as_api_error, bad_request, internal
from kvant.server.config import Limits
from kvant.server.embeddings import embed
from kvant.server.guard import App, Guard, Receive, Scope, Send, header, with_cors
from kvant.server.infill import infill
from kvant.server.live import live_of, page
from kvant.server.parameters import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    INFILL,
    MESSAGES,
    NONE,
    NOT_OFFERED,
    RESPONSES,
    TOKENIZE,
)
from kvant.server.requests import (
    Facts,
    Generation,
    check_model,
    check_tokens,
    conversation,
    parse,
    read_chat,
    read_completion,
    tool_specs,
)
from kvant.server.responses.handle import (
    cancel_response,
    count_input,
    delete_response,
    read_input_items,
    read_stored,
    respond,
)
from kvant.server.responses.wire import (
    Deleted,
    InputItems,
    ResponseAnswer,
    ResponseBody,
    ResponseEvent,
    ResponseInputTokens,
)
from kvant.server.routers import loads, render_chat, render_completion
from kvant.server.service import Service
from kvant.server.sessions import delete_session, list_sessions, restore_session, save_session
from kvant.server.unserved import refuse_unserved

_log = logging.getLogger(__name__)
_CLIENT_LEFT = 499
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


# -- generating --------------------------------------------------------------------------------


async def _chat(call: Call) -> Response:
    return await _generate(call, read_chat, chat=True)


async def _complete(call: Call) -> Response:
    return await _generate(call, read_completion, chat=False)


async def _generate(
    call: Call, read: Callable[[bytes, Limits, Facts], Generation], *, chat: bool
) -> Response:
    service = call.service
    limits = service.config.limits
    generation = await call.read(lambda data: read(data, limits, service.require()))
    reply = service.require().reply
    name = service.config.served_names[0]
    writer = Choices(chat, name, service.tokenizing, generation, reply)
    return await generate(call, writer, key=call.key)


# -- the model ---------------------------------------------------------------------------------


async def _models(call: Call) -> Response:
    call.service.require()
    names = call.service.config.served_names
    return as_json(wire.ModelList(data=[_card(call.service, name) for name in names]))


async def _model(call: Call) -> Response:
    name = call.scope["path"].removeprefix("/v1/models/")
    check_model(name, call.service.require())
    return as_json(_card(call.service, name))


def _card(service: Service, name: str) -> wire.ModelCard:
    ready = service.ready
    return wire.ModelCard(
        id=name,
        created=service.started,
        root=ready.model,
        max_model_len=ready.max_model_len,
        kv_cache=_stored(service),
    )


def _stored(service: Service) -> wire.StoredKV:
    ready = service.ready
    return wire.StoredKV(
        ready.stored_as, ready.bytes_per_token, ready.capacity_tokens, ready.page_size
    )


async def _plan(call: Call) -> Response:
    call.service.require()
    return Response(call.service.ready.plan, media_type="application/json")


async def _live(call: Call) -> Response:
    return as_json(live_of(call.service))


async def _page(call: Call) -> Response:
    data, headers = page()
    return Response(data, 200, headers, "text/html")


async def _tokenize(call: Call) -> Response:
    given, raw = await call.read(lambda data: parse(data, wire.TokenizeBody))
    return await unless_disconnected(call.receive, _tokens_of(call.service, given, raw))


async def _tokens_of(service: Service, given: wire.TokenizeBody, raw: dict[str, Any]) -> Response:
    facts = service.require()
    check_model(given.model, facts)
    refuse_unserved(raw, wire.TokenizeBody, TOKENIZE)
    if (given.prompt is None) == (given.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if service.tokenizing is None:
        raise bad_request("this model has no tokenizer", "prompt")
    try:
        if given.messages is not None:
            talk = conversation(given, facts)
            if given.tools:
                talk = replace(talk, tools=tool_specs(given.tools, facts))
            special = given.add_special_tokens is True
            tokens = list((await service.encode_chat(talk, special=special))[0])
        else:
            tokens = await asyncio.to_thread(
                service.tokenizing.encode,
                given.prompt or "",
                add_special_tokens=given.add_special_tokens is not False,
            )
    except RequestError as fault:
        raise as_api_error(fault) from None
    body = wire.Tokens(len(tokens), facts.max_model_len, tokens)
    if given.return_token_strs:
        backend = service.tokenizing.backend
        body.token_strs = [backend.id_to_token(token) for token in tokens]
    return as_json(body)


async def _detokenize(call: Call) -> Response:
    given, raw = await call.read(lambda data: parse(data, wire.DetokenizeBody))
    refuse_unserved(raw, wire.DetokenizeBody, NONE)
    facts = call.service.require()
    check_model(given.model, facts)
    check_tokens(given.tokens, "tokens", facts)
    if call.service.tokenizing is None:
        raise bad_request("this model has no tokenizer", "tokens")
    # As a batch of one: only then the library releases the interpreter lock.
    decode = call.service.tokenizing.backend.decode_batch
    (text,) = await asyncio.to_thread(decode, [given.tokens], skip_special_tokens=False)
    return as_json(wire.Text(text))


async def _tokenizer_info(call: Call) -> Response:
    facts = call.service.require()
    if call.service.tokenizing is None:
        raise ApiError(404, "this model has no tokenizer")
    tokenizer = call.service.tokenizing.tokenizer
    special = tokenizer.special_tokens_map
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return as_json(
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
    state: Any = "draining" if service.draining else service.supervisor.state.value
    headers = None if good else {"retry-after": "2"}
    answer = wire.State(state)
    loading = service.supervisor.loading
    if loading is not None and not good:
        answer.phase = loading.task
        if loading.fraction is not None:
            answer.fraction = loading.fraction
    return as_json(answer, 200 if good else 503, headers)


async def _load(call: Call) -> Response:
    return as_json(wire.Load(call.service.admission.held))


async def _version(call: Call) -> Response:
    return as_json(wire.Version(__version__))


async def _server_info(call: Call) -> Response:
    facts = call.service.require()
    ready = call.service.ready
    return as_json(
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
    return as_json(document(ENDPOINTS, config.limits, facts, has_keys=bool(config.api_keys)))


_GENERATES = (400, 404, 413, 429, 503)
_READS = (400, 404, 413, 503)
_ANTHROPIC = (MessagesError, error_body)

ENDPOINTS = (
    Endpoint(
        "POST", "/v1/chat/completions", "Answer a conversation", _chat, wire.ChatCompletion,
        wire.ChatBody, CHAT, wire.ChatCompletionChunk, _GENERATES, generates=True,
    ),
    Endpoint(
        "POST", "/v1/completions", "Complete texts or token ids", _complete, wire.Completion,
        wire.CompletionBody, COMPLETIONS, wire.CompletionChunk, _GENERATES, generates=True,
    ),
    Endpoint(
        "POST", "/infill", "Fill the gap between two texts", infill, wire.InfillAnswer,
        wire.InfillBody, INFILL, wire.InfillAnswer, _GENERATES, generates=True,
    ),
    Endpoint(
        "POST", "/v1/responses", "Answer with OpenAI's Responses API", respond, ResponseAnswer,
        ResponseBody, RESPONSES, ResponseEvent, _GENERATES, generates=True,
    ),
    Endpoint(
        "POST", "/v1/responses/input_tokens", "Tokens of a response's input", count_input,
        ResponseInputTokens, ResponseBody, RESPONSES, errors=_READS,
    ),
    Endpoint(
        "GET", "/v1/responses/{id}", "A stored response", read_stored, ResponseAnswer,
        errors=(400, 404, 503),
    ),
    Endpoint(
        "DELETE", "/v1/responses/{id}", "Forget a stored response", delete_response, Deleted,
        errors=(404, 503),
    ),
    Endpoint(
        "POST", "/v1/responses/{id}/cancel", "End a response in the background", cancel_response,
        ResponseAnswer, errors=(400, 404, 503),
    ),
    Endpoint(
        "GET", "/v1/responses/{id}/input_items", "What a stored response was asked",
        read_input_items, InputItems, errors=(404, 503),
    ),
    Endpoint(
        "POST", "/v1/embeddings", "Embed texts or token ids", embed, wire.EmbeddingList,
        wire.EmbeddingBody, EMBEDDINGS, errors=_GENERATES, generates=True,
    ),
    Endpoint(
        "POST", "/v1/messages", "Answer with Anthropic's Messages API", message, MessagesAnswer,
        MessagesBody, MESSAGES, MessagesEvent, _GENERATES, generates=True, fault=_ANTHROPIC,
    ),
    Endpoint(
        "POST", "/v1/messages/count_tokens", "Tokens of a conversation", count_tokens, InputTokens,
        CountBody, MESSAGES, errors=_READS, fault=_ANTHROPIC,
    ),
    Endpoint("GET", "/v1/models", "The served models", _models, wire.ModelList, errors=(503,)),
    Endpoint(
        "GET", "/v1/models/{model}", "One served model", _model, wire.ModelCard, errors=(404, 503)
    ),
    Endpoint("GET", "/v1/kv/plan", "The JSON of `kvant plan`", _plan, wire.Plan, errors=(503,)),
    Endpoint(
        "POST", "/v1/kv/sessions/{id}", "Save a conversation and its pages", save_session,
        wire.SessionCard, wire.ChatBody, CHAT, errors=_GENERATES, generates=True,
    ),
    Endpoint(
        "GET", "/v1/kv/sessions/{id}", "A saved conversation", restore_session,
        wire.RestoredSession, errors=(400, 404, 409, 503),
    ),
    Endpoint(
        "GET", "/v1/kv/sessions", "Saved conversations", list_sessions, wire.SessionList,
        errors=(400, 404, 503),
    ),
    Endpoint(
        "DELETE", "/v1/kv/sessions/{id}", "Forget a saved conversation", delete_session,
        wire.DeletedSession, errors=(400, 404, 503),
    ),
    Endpoint("GET", "/v1/kv/live", "The cache and its requests now", _live, wire.Live),
    Endpoint(
        "GET", "/", "A page to talk and to look at the cache", _page, None, is_open=True,
        text="text/html",
    ),
    Endpoint(
        "POST", "/tokenize", "Token ids of a text or conversation", _tokenize, wire.Tokens,
        wire.TokenizeBody, TOKENIZE, errors=_READS,
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
    Endpoint("GET", "/v1/loads", "The load, for gateways", loads, wire.Loads, errors=(503,)),
    Endpoint(
        "POST", "/v1/chat/completions/render", "Token ids of a conversation", render_chat,
        wire.Rendered, wire.ChatBody, CHAT, errors=_READS,
    ),
    Endpoint(
        "POST", "/v1/completions/render", "Token ids of each prompt", render_completion,
        wire.Rendered, wire.CompletionBody, COMPLETIONS, errors=_READS, is_list=True,
    ),
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
_PATTERNS = {
    path: re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path).replace(r"\{model\}", ".+")))
    for path in _BY_PATH
    if "{" in path
}


def _route(path: str) -> str | None:
    """Returns the path in the table of routes that matches a request's path, or None."""
    if path in _BY_PATH:
        return path if path not in _PATTERNS else None
    found = (known for known, pattern in _PATTERNS.items() if pattern.fullmatch(path))
    return next(found, None)


def is_open(path: str) -> bool:
    """Returns whether a path needs no API key."""
    return any(one.is_open for one in _BY_PATH.get(_route(path) or "", {}).values())


def dialect(path: str) -> Callable[[ApiError], object]:
    """Returns the function that makes an error's JSON for a request's path."""
    return _dialect(_route(path))


# -- the application ---------------------------------------------------------------------------


def make_app(service: Service) -> App:
    """Returns the ASGI application of a server."""
    return with_cors(_Application(service), service.config.allowed_origins)


class _Application:
    """Checks, routes and answers requests, turns failures into error responses, and counts responses."""

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
        except ApiError as fault:  # raised by a stream before its first event
            await _error(fault, _dialect(route))(scope, receive, watched)
        except Exception:
            _log.exception("a request failed")
            if status == 0:
                await _error(internal(), _dialect(route))(scope, receive, watched)
        finally:
            if status:
                self._service.metrics.answered(route or "other", status)
                if self._service.config.log_requests:
                    self._note(call, route or "other", status, time.monotonic() - started)

    async def _answer(self, call: Call, route: str | None) -> Response:
        """Returns the endpoint's response, or an error response."""
        endpoints = _BY_PATH.get(route or "", {})
        endpoint = endpoints.get(call.scope["method"])
        says = _dialect(route)
        try:
            call.key = self._guard.check(
                call.scope, is_open=any(one.is_open for one in endpoints.values())
            )
            if endpoint is not None and endpoint.generates:
                self._service.refuse_if_full()
        except ApiError as fault:
            return _unread(fault, says)
        try:
            if endpoint is not None:
                return await endpoint.handle(call)
            named = _not_offered(call.scope["path"])
            if endpoints and named is None:
                allow = {"allow": ", ".join(sorted(endpoints))}
                return _error(ApiError(405, "this endpoint has no such method"), says, allow)
            return _error(named or ApiError(404, "there is no such endpoint"), says)
        except ApiError as fault:
            # The rest of a body that is too large is not read, so the connection cannot be used again.
            return _unread(fault, says) if fault.status == 413 else _error(fault, says)
        except Disconnected:
            return Response(status_code=_CLIENT_LEFT)  # for the metrics: the client has left
        except Exception:
            _log.exception("a request failed")
            return _error(internal(), says)

    def _note(self, call: Call, route: str, status: int, seconds: float) -> None:
        """Prints one line of the request log, without the request's contents."""
        own = "-" if call.request_id is None else call.request_id.decode()
        counted = "".join(f" {name}={value}" for name, value in call.counted.items())
        method = call.scope["method"] if route != "other" else "-"
        self._service.say(
            f"kvant: request {method} {route} {status} id={own} seconds={seconds:.3f}{counted}"
        )


def _dialect(route: str | None) -> Callable[[ApiError], object]:
    """Returns the function that makes an error's JSON for a path of the table; OpenAI's by default."""
    endpoints = _BY_PATH.get(route or "", {})
    return next((one.fault[1] for one in endpoints.values()), openai_error)


def _not_offered(path: str) -> ApiError | None:
    """Returns the error for an endpoint of other servers, with an alternative; None for any other path."""
    for known, why in NOT_OFFERED.items():
        if path.removeprefix("/v1").rstrip("/") == known or path.startswith(f"/v1{known}/"):
            return ApiError(
                404, f"{known} is not offered by this server: {why}", code="not_offered"
            )
    return None


def _error(
    fault: ApiError,
    says: Callable[[ApiError], object] = openai_error,
    headers: dict[str, str] | None = None,
) -> Response:
    return as_json(says(fault), fault.status, {**fault.headers, **(headers or {})})


def _unread(fault: ApiError, says: Callable[[ApiError], object]) -> Response:
    """Returns an error response for a request whose body was not read. If the client should retry, the
    connection stays open and the body is discarded. Else the connection is closed.
    """
    headers = {} if fault.retry_after is not None else {"connection": "close"}
    if fault.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _error(fault, says, headers)
