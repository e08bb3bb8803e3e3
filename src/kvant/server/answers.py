"""The types of an HTTP request and its route, and the writing of answers from the engine's pieces: whole, and
as server-sent events. `Choices` writes OpenAI's answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvant.engine.text import Tokenizing
from kvant.errors import RequestError
from kvant.sampling.logprobs import TokenLogprobs
from kvant.server import wire
from kvant.server.api_error import ApiError, Disconnected, as_api_error, internal
from kvant.server.guard import read_body
from kvant.server.messages import Piece
from kvant.server.parameters import NONE, Table
from kvant.server.reply import Part, ReplyReader
from kvant.server.requests import Generation
from kvant.server.service import Running, Sequence, Service
from kvant.server.transcript import finite, text_of

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Writer(Protocol):
    """Writes the answer to one request in one wire form.

    Methods return encoded events of a stream. For an answer without a stream, the events are dropped and
    `whole` is called at the end.
    """

    @property
    def ping(self) -> bytes: ...

    @property
    def generation(self) -> Generation: ...

    def begin(self, running: Running) -> list[bytes]:
        """Returns the events before the first token."""

    def add(self, running: Running, sequence: Sequence, pieces: list[Piece]) -> list[bytes]:
        """Takes pieces of one sequence. Returns their events."""

    def end(self, running: Running) -> list[bytes]:
        """Returns the events after the last token."""

    def fail(self, fault: ApiError) -> list[bytes]:
        """Returns the events that end a failed stream."""

    def whole(self, running: Running) -> object:
        """Returns the complete answer of a request that has ended, to be encoded as JSON."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Writes OpenAI's answers. chat: as messages and deltas, else as text.

    format: the family's format of replies, for `ReplyReader`. readers, texts: by the choice's index.
    """

    chat: bool
    model: str
    tokenizing: Tokenizing | None
    generation: Generation
    format: dict[str, Any] | None = None
    readers: dict[int, ReplyReader] = field(default_factory=dict)
    texts: dict[int, list[str]] = field(default_factory=dict)
    heads: list[dict[str, Any]] = field(default_factory=list)
    ping: bytes = b": ping\n\n"

    def head(self) -> dict[str, Any]:
        """Returns the first fields of the whole answer, or of every chunk."""
        prefix = "chatcmpl" if self.chat else "cmpl"
        own = self.generation.request_id or uuid.uuid4().hex
        return {"id": f"{prefix}-{own}", "created": int(time.time()), "model": self.model}

    def whole(self, running: Running) -> wire.ChatCompletion | wire.Completion:
        sequences = list(running.sequences.values())
        texts = {s.index: "".join(self.texts.get(s.index, ())) for s in sequences}
        for place, sequence in enumerate(sequences):
            # Only the first answer to a prompt computes the prompt's log-probabilities.
            first = sequences[place - place % running.copies]
            sequence.prompt_logprobs = first.prompt_logprobs
        if not self.chat:
            return wire.Completion(
                **self.head(),
                choices=[self._completion_choice(s, texts[s.index]) for s in sequences],
                usage=usage(running),
            )
        return wire.ChatCompletion(
            **self.head(),
            choices=[self._chat_choice(running, s, texts[s.index]) for s in sequences],
            usage=usage(running),
            prompt_logprobs=self._prompt_logprobs(sequences[0]),
            prompt_token_ids=self._prompt_ids(sequences[0]),
        )

    def _chat_choice(self, running: Running, sequence: Sequence, text: str) -> wire.ChatChoice:
        message, ending = wire.Message(text), self._ending(sequence)
        reader = self._reader(running, sequence)
        if reader is not None:
            parts = [*reader.feed(text), *reader.finish()]
            message = _message(parts, with_reasoning=self.generation.include_reasoning)
            ending["finish_reason"] = _reason(ending["finish_reason"], reader)
        return wire.ChatChoice(
            message=message, logprobs=self._chat_logprobs(sequence.logprobs), **ending
        )

    def _reader(self, running: Running, sequence: Sequence) -> ReplyReader | None:
        """Returns the reader that splits this answer into parts; None if its text is sent unchanged."""
        if not self.generation.reads_reply:
            return None
        index = sequence.index
        if index not in self.readers:
            tools = self.generation.tools
            self.readers[index] = ReplyReader(self.format, tools, running.rendered)
        return self.readers[index]

    def _completion_choice(self, sequence: Sequence, text: str) -> wire.CompletionChoice:
        return wire.CompletionChoice(
            text=self._echoed(sequence) + text,
            logprobs=self._completion_logprobs(sequence, sequence.logprobs),
            prompt_logprobs=self._prompt_logprobs(sequence),
            prompt_token_ids=self._prompt_ids(sequence),
            **self._ending(sequence),
        )

    def _ending(self, sequence: Sequence) -> dict[str, Any]:
        ended = sequence.ended
        assert ended is not None
        assert ended.finish_reason is not None
        return {
            "index": sequence.index,
            "finish_reason": ended.finish_reason.value,
            "stop_reason": ended.stop_reason,
            "token_ids": sequence.token_ids if self.generation.token_ids else UNSET,
        }

    def _prompt_ids(self, sequence: Sequence) -> wire.TokenIds:
        return list(sequence.prompt_token_ids) if self.generation.token_ids else UNSET

    # -- streams -------------------------------------------------------------------------------

    def begin(self, running: Running) -> list[bytes]:
        """Returns the first chunks of a chat's stream, one for each choice; none for completions."""
        head = self.head()
        if self.generation.include_usage:
            head["usage"] = None
        self.heads.append(head)
        if not self.chat:
            return []
        counted = self._counted(running)
        if self.generation.continuous_usage:  # new tokens are counted from the next chunk on
            details = usage(running).prompt_tokens_details
            count = running.num_prompt_tokens
            counted = {**counted, "usage": wire.Usage(count, 0, count, details)}
        return [
            _event(
                wire.ChatCompletionChunk(
                    **counted,
                    choices=[
                        wire.ChatChunkChoice(
                            index=s.index, delta=wire.Delta("assistant", content="")
                        )
                    ],
                    prompt_token_ids=self._prompt_ids(s),
                )
            )
            for s in running.sequences.values()
        ]

    def add(self, running: Running, sequence: Sequence, pieces: list[Piece]) -> list[bytes]:
        if not self.generation.stream:
            self.texts.setdefault(sequence.index, []).extend(piece.text for piece in pieces)
            return []
        part = self.chunk(self._counted(running), running, sequence, pieces)
        return [] if part is None else [_event(part)]

    def end(self, running: Running) -> list[bytes]:
        found = []
        if self.generation.include_usage:
            kind = wire.ChatCompletionChunk if self.chat else wire.CompletionChunk
            found = [_event(kind(**{**self.heads[0], "usage": usage(running)}, choices=[]))]
        return [*found, DONE]

    def fail(self, fault: ApiError) -> list[bytes]:
        return [_event(fault.body), DONE]

    def _counted(self, running: Running) -> dict[str, Any]:
        """Returns the first fields of the next chunk, with the usage so far if every chunk shows it."""
        head = self.heads[0]
        return {**head, "usage": usage(running)} if self.generation.continuous_usage else head

    def chunk(
        self, head: dict[str, Any], running: Running, sequence: Sequence, pieces: list[Piece]
    ) -> msgspec.Struct | None:
        """Returns one chunk with all new pieces of one sequence; None if they show nothing."""
        text, last = "".join(piece.text for piece in pieces), pieces[-1]
        fresh = [one for piece in pieces for one in piece.logprobs]
        ended = last.finish_reason
        more: dict[str, Any] = {"index": sequence.index}
        if ended is not None:
            more |= {"finish_reason": ended.value, "stop_reason": last.stop_reason}
        if self.generation.token_ids:
            more["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        if self.chat:
            chat_logprobs = self._chat_logprobs(fresh) if fresh else None
            delta = wire.Delta(content=text) if text else wire.Delta()
            reader = self._reader(running, sequence)
            if reader is not None:
                parts = reader.feed(text)
                if ended is not None:
                    parts += reader.finish()
                    more["finish_reason"] = _reason(ended.value, reader)
                delta = _delta(parts, with_reasoning=self.generation.include_reasoning)
            if delta == wire.Delta() and not (ended or chat_logprobs or more.get("token_ids")):
                return None
            choice = wire.ChatChunkChoice(delta=delta, logprobs=chat_logprobs, **more)
            return wire.ChatCompletionChunk(**head, choices=[choice])
        text = self._echoed(sequence) + text
        first = not sequence.begun
        logprobs = self._completion_logprobs(sequence, fresh)
        sequence.begun = True
        if logprobs is not None and not logprobs.tokens:
            logprobs = None
        if not (text or ended or logprobs or more.get("token_ids")):
            return None
        if first:
            more["prompt_token_ids"] = self._prompt_ids(sequence)
        part = wire.CompletionChunkChoice(text=text, logprobs=logprobs, **more)
        return wire.CompletionChunk(**head, choices=[part])

    def _echoed(self, sequence: Sequence) -> str:
        """Returns the prompt's text if the answer echoes it and has not begun, else ""."""
        if not self.generation.echo or sequence.begun:
            return ""
        prompt = self.generation.prompts[sequence.index // self.generation.n]
        if isinstance(prompt, str):
            return prompt
        if self.tokenizing is None:
            return "".join(self._text(token) for token in prompt)
        return self.tokenizing.backend.decode(list(prompt), skip_special_tokens=False)

    # -- log-probabilities ---------------------------------------------------------------------

    def _chat_logprobs(self, logprobs: Items[TokenLogprobs]) -> wire.ChatLogprobs | None:
        if self.generation.sampling.logprobs is None:
            return None
        return wire.ChatLogprobs(
            [
                wire.TokenLogprob(
                    *self._one(one.token_id, one.logprob),
                    [wire.TopLogprob(*self._one(token, value)) for token, value in one.top],
                )
                for one in logprobs
            ]
        )

    def _completion_logprobs(
        self, sequence: Sequence, fresh: Items[TokenLogprobs]
    ) -> wire.CompletionLogprobs | None:
        """Returns log-probabilities of the tokens sent now; null for the first token of an echoed prompt."""
        num_top = self.generation.sampling.logprobs
        if num_top is None:
            return None
        entries: list[tuple[int, TokenLogprobs | None]] = [(one.token_id, one) for one in fresh]
        if self.generation.echo and not sequence.begun:
            of_prompt = (None, *(sequence.prompt_logprobs or ()))
            entries = [*zip(sequence.prompt_token_ids, of_prompt, strict=True), *entries]
        tokens = [self._text(token) for token, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(sequence.num_logprob_chars)
            sequence.num_logprob_chars += len(token)
        return wire.CompletionLogprobs(
            tokens,
            [None if one is None else finite(one.logprob) for _, one in entries],
            [None if one is None else self._top(one, num_top) for _, one in entries],
            offsets,
        )

    def _top(self, one: TokenLogprobs, num_top: int) -> dict[str, float]:
        """Returns log-probabilities of the token itself, as in OpenAI's API, and of the likeliest tokens.

        Keys are the tokens' texts. Tokens can have equal texts, for example parts of characters. Then the
        token itself keeps the text as its key, and the others get "token_id:N".
        """
        found = {self._text(one.token_id): finite(one.logprob)}
        for token, value in one.top[:num_top]:
            if token != one.token_id:
                text = self._text(token)
                found[f"token_id:{token}" if text in found else text] = finite(value)
        return found

    def _prompt_logprobs(self, sequence: Sequence) -> wire.PromptLogprobs:
        """Returns, in vLLM's shape, for every prompt token its own entry and the likeliest ones, by id."""
        num_top = self.generation.prompt_logprobs
        if num_top is None:
            return None
        found: list[dict[str, wire.PromptLogprob] | None] = [None]
        for one in sequence.prompt_logprobs or ():
            ranked = [(token, value, rank) for rank, (token, value) in enumerate(one.top, 1)]
            shown = {token: (value, rank) for token, value, rank in ranked[:num_top]}
            shown.setdefault(one.token_id, (one.logprob, one.rank))
            found.append(
                {
                    str(token): wire.PromptLogprob(finite(value), rank, self._text(token))
                    for token, (value, rank) in shown.items()
                }
            )
        return found

    def _one(self, token_id: int, logprob: float) -> tuple[str, float, list[int] | None]:
        text = self._text(token_id)
        # The bytes of a part of a character are unknown, and "token_id:5" is not the token's text.
        known = "\N{REPLACEMENT CHARACTER}" not in text and not self.generation.tokens_as_ids
        return text, finite(logprob), list(text.encode()) if known else None

    def _text(self, token_id: int) -> str:
        return text_of(None if self.generation.tokens_as_ids else self.tokenizing, token_id)


def _message(parts: list[Part], *, with_reasoning: bool) -> wire.Message:
    text = {
        kind: "".join(part.text for part in parts if part.kind == kind)
        for kind in ("content", "reasoning")
    }
    calls: list[wire.ToolCall] = []
    for part in parts:
        if part.kind == "call" and part.id is not None and part.name is not None:
            calls.append(wire.ToolCall(part.id, wire.Function("", part.name)))
        if part.kind == "call":
            calls[part.number].function.arguments += part.text
    message = wire.Message(text["content"] or (None if calls else ""))
    if calls:
        message.tool_calls = calls
    if text["reasoning"] and with_reasoning:
        message.reasoning = message.reasoning_content = text["reasoning"]
    return message


def _delta(parts: list[Part], *, with_reasoning: bool) -> wire.Delta:
    delta = wire.Delta()
    if content := "".join(part.text for part in parts if part.kind == "content"):
        delta.content = content
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    if reasoning and with_reasoning:
        delta.reasoning = delta.reasoning_content = reasoning
    calls = [
        wire.ToolCallPart(
            index=part.number,
            id=part.id or UNSET,
            type="function" if part.id else UNSET,
            function=wire.Function(part.text, part.name or UNSET),
        )
        for part in parts
        if part.kind == "call"
    ]
    if calls:
        delta.tool_calls = calls
    return delta


def _reason(reason: str, reader: ReplyReader) -> str:
    return "tool_calls" if reader.has_calls and reason == "stop" else reason


def usage(running: Running) -> wire.Usage:
    """Returns the token counts. Each prompt and its cached tokens count once, for any number of answers."""
    sequences = list(running.sequences.values())
    first = sequences[:: running.copies]
    cached = sum(s.ended.num_cached_tokens for s in first if s.ended is not None)
    answer = sum(len(s.token_ids) for s in sequences)
    return wire.Usage(
        running.num_prompt_tokens,
        answer,
        running.num_prompt_tokens + answer,
        wire.PromptDetails(min(cached, running.num_prompt_tokens)),
    )


# -- sending -----------------------------------------------------------------------------------


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of `work`. Cancels it and raises Disconnected if the client disconnects.

    The request's body must have been read before, since `receive` is used to wait for the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def num_prompt_tokens(call: Call, generation: Generation) -> int:
    """Returns the number of tokens of a conversation's prompt."""
    assert generation.conversation is not None
    try:
        work = call.service.encode_chat(generation.conversation)
        return len((await unless_disconnected(call.receive, work))[0])
    except RequestError as fault:
        raise as_api_error(fault) from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends a running request as server-sent events, and closes the request in every case.

    The head is sent with the first piece or ping. A failure before it is an ordinary error response, so a
    router in front can retry elsewhere. A later failure is sent as an event. Every complete stream ends with
    the last event of its wire form; a stream without it was cut.
    """

    def __init__(self, service: Service, running: Running, writer: Writer) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        del self.headers["content-length"]
        self._service, self._running, self._writer = service, running, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            limits = self._service.config.limits
            most = limits.request_seconds + limits.ping_seconds
            # It is no error of the server if a client leaves or never reads.
            with contextlib.suppress(Disconnected, OSError, TimeoutError):
                async with asyncio.timeout(most):
                    await unless_disconnected(receive, self._write(send))
        finally:
            self._service.close(self._running)

    async def _write(self, send: Send) -> None:
        has_begun = False
        async for data in self._events():
            if not has_begun:
                has_begun = True
                head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(head)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        """Yields at least one event. Raises only before the first one; later failures become events."""
        writer, running, has_begun = self._writer, self._running, False
        # prompt_logprobs brings up to half a million values with the first piece: write them in a thread.
        heavy = writer.generation.sampling.prompt_logprobs is not None
        try:
            async for news in self._service.events(running):
                if not has_begun:
                    has_begun = True
                    for data in writer.begin(running):
                        yield data
                if news is None:
                    yield writer.ping
                    continue
                for sequence, pieces in _by_sequence(news):
                    if heavy and not sequence.begun:
                        found = await asyncio.to_thread(writer.add, running, sequence, pieces)
                    else:
                        found = writer.add(running, sequence, pieces)
                    for data in found:
                        yield data
            if not has_begun:
                has_begun = True
                for data in writer.begin(running):
                    yield data
            for data in writer.end(running):
                yield data
        except ApiError as fault:
            if not has_begun:
                raise
            for data in writer.fail(fault):
                yield data
        except Exception:
            if not has_begun:
                raise
            _log.exception("a stream failed")
            for data in writer.fail(internal()):
                yield data


DONE = b"data: [DONE]\n\n"


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _by_sequence(news: list[tuple[Sequence, Piece]]) -> list[tuple[Sequence, list[Piece]]]:
    found: dict[int, tuple[Sequence, list[Piece]]] = {}
    for sequence, piece in news:
        found.setdefault(sequence.index, (sequence, []))[1].append(piece)
    return list(found.values())


# -- requests and routes ----------------------------------------------------------------------

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

    @property
    def owner(self) -> str:
        """The owner of the stored responses that this request may read: its API key, or ""."""
        return self.key or ""

    async def read(self, read: Callable[[bytes], _Read]) -> _Read:
        """Reads the body and returns `read(body)`, which runs in a thread if the body is large."""
        limits = self.service.config.limits
        data = await read_body(self.scope["headers"], self.receive, limits)
        return read(data) if len(data) < _LARGE else await asyncio.to_thread(read, data)


def openai_error(fault: ApiError) -> object:
    return fault.body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table of routes. "{model}" in a path matches the rest of it, other names one segment.

    answer: the type of its JSON, or None for text, whose media type is `text`. event: the type of a stream's
    events. parameters: the table of the body's parameters that its type does not have.
    errors: the error statuses of this endpoint beside the common ones. not_now: its status 503 has the
    answer's own type. is_list: the answer is a list of `answer`. generates: it takes places in the engine, so
    a full server refuses it before it reads the body. is_open: it needs no key. fault: the type of an error's
    JSON, and the function that makes it from an ApiError.
    """

    method: str
    path: str
    summary: str
    handle: Callable[[Call], Awaitable[Response]]
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    parameters: Table = NONE
    event: type[msgspec.Struct] | None = None
    errors: tuple[int, ...] = ()
    not_now: bool = False
    generates: bool = False
    is_open: bool = False
    is_list: bool = False
    text: str = "text/plain"
    fault: tuple[type[msgspec.Struct], Callable[[ApiError], object]] = (wire.Error, openai_error)


async def generate(call: Call, writer: Writer, *, key: str | None) -> Response:
    """Returns the response, whole or as a stream. key: the API key that its cached pages belong to."""
    service, generation = call.service, writer.generation
    if generation.stream:
        running = await service.open(generation, key=key, counted=call.counted)
        return EventStream(service, running, writer)

    async def whole() -> Response:
        running = await service.open(generation, key=key, counted=call.counted)
        if generation.sampling.prompt_logprobs is None:
            return as_json(await finished(service, running, writer))
        # Up to half a million values: encode them in a thread, which does not block other requests.
        answer = await finished(service, running, writer, threaded=True)
        return await asyncio.to_thread(as_json, answer)

    return await unless_disconnected(call.receive, whole())


async def finished(
    service: Service, running: Running, writer: Writer, *, threaded: bool = False
) -> object:
    """Waits for the end of a running request and closes it. Returns the writer's complete answer.

    threaded: write the answer in a thread, because it is large.
    """
    try:
        writer.begin(running)
        async for news in service.events(running):
            for sequence, piece in news or ():
                writer.add(running, sequence, [piece])
        writer.end(running)
        return await asyncio.to_thread(writer.whole, running) if threaded else writer.whole(running)
    finally:
        service.close(running)


def as_json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
