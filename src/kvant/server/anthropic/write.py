"""Writes Anthropic's message from the engine's pieces, as events and as a whole, and Anthropic's errors."""

from __future__ import annotations

import json
import uuid
from typing import Any

import msgspec

from kvant.server.anthropic.wire import MessagesAnswer, MessagesError, MessagesFault, MessagesUsage
from kvant.server.api_error import ApiError
from kvant.server.messages import Piece
from kvant.server.reply import Part
from kvant.server.requests import Generation
from kvant.server.service import Running, Sequence
from kvant.server.transcript import Transcript

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def error_body(fault: ApiError) -> MessagesError:
    """Returns the body of an error in Anthropic's shape."""
    kind = _ERRORS.get(
        fault.status, "api_error" if fault.status >= 500 else "invalid_request_error"
    )
    return MessagesError(MessagesFault(kind, fault.message, fault.param, fault.code))


class MessageWriter:
    """Writes one message. The methods of a stream also fill `answer`, which is the whole message."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, generation: Generation, model: str, format: dict[str, Any] | None) -> None:
        self.generation = generation
        self._transcript = Transcript(generation, format)
        own = generation.request_id or uuid.uuid4().hex
        self.answer = MessagesAnswer(
            id=f"msg_{own}", model=model, content=[], usage=MessagesUsage(0, 0)
        )
        self._kind = ""
        self._texts: list[str] = []
        self._events: list[bytes] = []

    def begin(self, running: Running) -> list[bytes]:
        self.answer.usage.input_tokens = running.num_prompt_tokens
        self._send("message_start", message=self.answer)
        return self._taken()

    def add(self, running: Running, sequence: Sequence, pieces: list[Piece]) -> list[bytes]:
        for part, _ in self._transcript.read(running, pieces):
            self._part(part)
        return self._taken()

    def end(self, running: Running) -> list[bytes]:
        self._close()
        answer, transcript = self.answer, self._transcript
        (sequence,) = running.sequences.values()
        cached = 0 if sequence.ended is None else sequence.ended.num_cached_tokens
        cached = min(cached, running.num_prompt_tokens)
        answer.usage = MessagesUsage(
            running.num_prompt_tokens - cached, transcript.num_tokens, cached
        )
        if transcript.is_cut:
            answer.stop_reason = "max_tokens"
        elif transcript.has_calls:
            answer.stop_reason = "tool_use"
        elif isinstance(transcript.stop_reason, str):
            answer.stop_reason, answer.stop_sequence = "stop_sequence", transcript.stop_reason
        else:
            answer.stop_reason = "end_turn"
        delta = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        self._send("message_delta", delta=delta, usage=answer.usage)
        self._send("message_stop")
        return self._taken()

    def fail(self, fault: ApiError) -> list[bytes]:
        return [_event("error", msgspec.json.encode(error_body(fault)))]

    def whole(self, running: Running) -> MessagesAnswer:
        return self.answer

    def _part(self, part: Part) -> None:
        if part.kind != self._kind or part.id is not None:
            self._close()
            self._open(part)
        if not part.text:
            return
        self._texts.append(part.text)
        kind, field = _DELTAS[part.kind]
        delta = {"type": kind, field: part.text}
        self._send("content_block_delta", index=len(self.answer.content) - 1, delta=delta)

    def _open(self, part: Part) -> None:
        self._kind = part.kind
        block: dict[str, Any]
        if part.kind == "call":
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        elif part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self.answer.content.append(block)
        self._send("content_block_start", index=len(self.answer.content) - 1, content_block=block)

    def _close(self) -> None:
        if not self._kind:
            return
        block, text = self.answer.content[-1], "".join(self._texts)
        if self._kind == "call":
            block["input"] = _arguments(text)
        else:
            block["thinking" if self._kind == "reasoning" else "text"] = text
        self._send("content_block_stop", index=len(self.answer.content) - 1)
        self._kind, self._texts = "", []

    def _send(self, type: str, **fields: Any) -> None:
        if self.generation.stream:
            self._events.append(_event(type, msgspec.json.encode({"type": type, **fields})))

    def _taken(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def _event(type: str, data: bytes) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + data + b"\n\n"


def _arguments(text: str) -> Any:
    """Returns a call's arguments as an object; empty if max_tokens cut them."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}
