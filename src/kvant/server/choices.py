"""Writes chat completions and text completions as OpenAI's clients read them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from kvant.engine.text import Tokenizing
from kvant.sampling.logprobs import TokenLogprobs
from kvant.server import wire
from kvant.server.api_error import ApiError
from kvant.server.messages import Piece
from kvant.server.reply import Part, ReplyReader
from kvant.server.requests import Generation
from kvant.server.service import Running, Sequence
from kvant.server.transcript import finite, text_of

DONE = b"data: [DONE]\n\n"
"""The event that ends every stream of choices."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The `Writer` of chat completions and text completions. chat: write messages and deltas, else text.

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


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
