"""The routes: bytes in, OpenAI's shapes out. Thin: what is allowed is decided in `validate`, and what
happens in `service`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvant import __version__
from kvant.errors import RequestError
from kvant.server.answers import Shape
from kvant.server.api_error import ApiError, bad_request, internal, of_request
from kvant.server.guard import KEY, App, Disconnected, Guard, read_body, with_cors
from kvant.server.openapi import document
from kvant.server.protocol import DetokenizeBody, TokenizeBody
from kvant.server.service import Service
from kvant.server.streaming import EventStream, unless_disconnected
from kvant.server.unsupported import refuse_unsupported
from kvant.server.validate import (
    Generation,
    check_model,
    check_tokens,
    conversation,
    parse,
    read_chat,
    read_completion,
)

_log = logging.getLogger(__name__)
_CLIENT_LEFT = 499


def make_app(service: Service) -> App:
    """The ASGI application: the guard, and behind it the routes."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    limits = service.config.limits

    async def body_of(request: Request) -> bytes:
        kind = request.headers.get("content-type", "application/json")
        if kind.split(";")[0].strip().lower() != "application/json":
            raise bad_request("the body must be application/json", None)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise bad_request("compressed bodies are not taken", None)
        return await read_body(request.receive, limits)

    async def generate(request: Request, generation: Generation, *, chat: bool) -> Response:
        shape = Shape(chat, service.config.served_names[0], service.tokenizing, generation)
        key: str | None = request.scope.get(KEY)
        if generation.stream:
            running = await service.open(generation, key=key)
            return EventStream(
                service,
                running,
                shape,
                include_usage=generation.include_usage,
                closed=lambda: service.close(running),
            )

        async def whole() -> Response:
            running = await service.open(generation, key=key)
            try:
                texts: dict[int, str] = {s.index: "" for s in running.sequences.values()}
                async for news in service.events(running):
                    for sequence, piece in news or ():
                        texts[sequence.index] += piece.text
                return _json(shape.whole(running, texts))
            finally:
                service.close(running)

        return await unless_disconnected(request.receive, whole())

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await body_of(request)
        generation = read_chat(body, limits, service.require())
        return await generate(request, generation, chat=True)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await body_of(request)
        generation = read_completion(body, limits, service.require())
        return await generate(request, generation, chat=False)

    @app.get("/v1/models")
    async def models() -> Response:
        service.require()
        found = [_model(service, name) for name in service.config.served_names]
        return _json({"object": "list", "data": found})

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        check_model(model, service.require())
        return _json(_model(service, model))

    @app.get("/v1/kv/plan")
    async def kv_plan() -> Response:
        service.require()
        assert service.supervisor.ready is not None
        return Response(service.supervisor.ready.plan, media_type="application/json")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        given = parse(await body_of(request), TokenizeBody)
        return await unless_disconnected(request.receive, _tokenize(service, given))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        given = parse(await body_of(request), DetokenizeBody)
        facts = service.require()
        check_model(given.model, facts)
        check_tokens(given.tokens, "tokens", facts)
        if service.tokenizing is None:
            raise bad_request("this model has no tokenizer", "tokens")
        # As a batch of one, for which the library lets go of the interpreter.
        decode = service.tokenizing.backend.decode_batch
        (text,) = await asyncio.to_thread(decode, [given.tokens], skip_special_tokens=False)
        return _json({"prompt": text})

    @app.get("/health")
    async def health() -> Response:
        return _state(service, service.alive)

    @app.get("/ready")
    async def ready() -> Response:
        return _state(service, service.accepting)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return _json(document(limits, service.facts, has_keys=bool(service.config.api_keys)))

    @app.exception_handler(ApiError)
    async def refused(request: Request, fault: ApiError) -> Response:
        # What is left of a body is not read: the connection cannot be used again.
        more = {"connection": "close"} if fault.status == 413 else {}
        return _json(fault.body, fault.status, {**fault.headers, **more})

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, fault: HTTPException) -> Response:
        message = {404: "there is no such endpoint", 405: "this endpoint has no such method"}
        text = message.get(fault.status_code, fault.detail)
        error = ApiError(fault.status_code, text)
        return _json(error.body, fault.status_code, dict(fault.headers or {}))

    @app.exception_handler(Disconnected)
    async def left(request: Request, fault: Disconnected) -> Response:
        return Response(status_code=_CLIENT_LEFT)  # nobody reads it; it is counted

    guard = Guard(app, limits, service.config.api_keys, service.turn_away)
    return with_cors(_Counted(guard, service), service.config.allowed_origins)


class _Counted:
    """Counts answers by route, and turns what nobody caught into a 500 in the common shape."""

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status = 0

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            _log.exception("a request failed")
            if status == 0:
                response = _json(internal().body, 500, internal().headers)
                await response(scope, receive, watched)
        finally:
            if scope["type"] == "http" and status:
                route = scope.get("route")  # none where the guard refused
                path = getattr(route, "path", scope["path"]).replace("{model:path}", "{model}")
                self._service.metrics.answered(path, status)


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _state(service: Service, good: bool) -> Response:
    state = service.supervisor.state.value
    if service.draining:
        state = "draining"
    headers = None if good else {"retry-after": "2"}
    return _json({"status": state}, 200 if good else 503, headers)


def _model(service: Service, name: str) -> dict[str, Any]:
    ready = service.supervisor.ready
    assert ready is not None
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvant",
        "root": ready.model,
        "parent": None,
        "max_model_len": ready.max_model_len,
        "kv_cache": {
            "stored_as": ready.stored_as,
            "bytes_per_token": ready.bytes_per_token,
            "capacity_tokens": ready.capacity_tokens,
            "page_size": ready.page_size,
        },
    }


async def _tokenize(service: Service, given: TokenizeBody) -> Response:
    facts = service.require()
    check_model(given.model, facts)
    refuse_unsupported(given.model_extra)
    if (given.prompt is None) == (given.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if service.tokenizing is None:
        raise bad_request("this model has no tokenizer", "prompt")
    backend = service.tokenizing.backend
    try:
        if given.messages is not None:
            if given.add_special_tokens:
                raise bad_request(
                    "the chat template writes its own special tokens", "add_special_tokens"
                )
            talk = conversation(given.messages, facts)
            tokens = list(await service.encode_chat(talk))
        else:
            assert given.prompt is not None
            special = given.add_special_tokens is not False
            prompt = given.prompt
            tokens = await asyncio.to_thread(
                service.tokenizing.encode, prompt, add_special_tokens=special
            )
    except RequestError as fault:
        raise of_request(fault) from None
    body: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": facts.max_model_len,
        "tokens": tokens,
    }
    if given.return_token_strs:
        body["token_strs"] = [backend.id_to_token(token) for token in tokens]
    return _json(body)
