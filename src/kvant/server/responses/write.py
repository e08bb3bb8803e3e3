"""Writes a response from the engine's pieces, as events and as a whole."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from kvant.engine.text import Tokenizing
from kvant.sampling.logprobs import TokenLogprobs
from kvant.server.api_error import ApiError
from kvant.server.messages import Piece
from kvant.server.reply import Part
from kvant.server.responses.read import LOGPROBS, Asked, Message
from kvant.server.responses.wire import (
    Incomplete,
    InputDetails,
    OutputDetails,
    ResponseAnswer,
    ResponseFault,
    ResponseUsage,
)
from kvant.server.service import Running, Sequence
from kvant.server.transcript import Transcript, finite, text_of

_TEXTS = {"content": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseWriter:
    """Writes one response. The methods of a stream also fill `answer`, so both ways give equal responses.

    on_end: called when the response is complete, has failed or was stopped.
    """

    ping = b": ping\n\n"

    def __init__(
        self, asked: Asked, model: str, format: dict[str, Any] | None, tokenizing: Tokenizing | None
    ) -> None:
        self.generation = asked.generation
        self.answer = _begun(asked, model)
        self.on_end: Callable[[], None] = lambda: None
        self._tokenizing = tokenizing
        self._has_logprobs = LOGPROBS in (asked.body.include or ())
        self._transcript = Transcript(asked.generation, format)
        self._open: dict[str, Any] | None = None  # the item that is being written
        self._kind = ""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._num_calls = 0
        self._events: list[bytes] = []
        self._number = 0

    def begin(self, running: Running) -> list[bytes]:
        self._send("response.created", response=self.answer)
        self._send("response.in_progress", response=self.answer)
        return self._taken()

    def add(self, running: Running, sequence: Sequence, pieces: list[Piece]) -> list[bytes]:
        for part, logprobs in self._transcript.read(running, pieces):
            self._part(part, logprobs)
        return self._taken()

    def end(self, running: Running) -> list[bytes]:
        cut = self._transcript.is_cut
        self._close("incomplete" if cut else "completed")
        (sequence,) = running.sequences.values()
        cached = 0 if sequence.ended is None else sequence.ended.num_cached_tokens
        prompt, new = running.num_prompt_tokens, self._transcript.num_tokens
        self.answer.usage = ResponseUsage(
            prompt,
            InputDetails(min(cached, prompt)),
            new,
            OutputDetails(self._transcript.num_reasoning_tokens),
            prompt + new,
        )
        self.answer.status = "incomplete" if cut else "completed"
        if cut:
            self.answer.incomplete_details = Incomplete("max_output_tokens")
        self._send(f"response.{self.answer.status}", response=self.answer)
        self.on_end()
        return self._taken()

    def fail(self, fault: ApiError) -> list[bytes]:
        """Ends a response that failed. The error's code is one of OpenAI's list."""
        self._close("incomplete")
        self.answer.status = "failed"
        code = "server_error" if fault.status >= 500 else "invalid_prompt"
        self.answer.error = ResponseFault(code, fault.message)
        self._send("response.failed", response=self.answer)
        self.on_end()
        return self._taken()

    def stop(self) -> None:
        """Ends a response that was cancelled, keeping its output so far."""
        self._close("incomplete")
        self.answer.status = "cancelled"
        self.on_end()

    def whole(self, running: Running) -> ResponseAnswer:
        return self.answer

    def messages(self) -> list[Message]:
        """Returns the answer as messages of a conversation."""
        turn: Message = {"role": "assistant", "content": None}
        for item in self.answer.output:
            if item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"] or "{}"}
                call = {"id": item["call_id"], "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            else:
                name = "content" if item["type"] == "message" else "reasoning_content"
                text = "".join(part["text"] for part in item["content"])
                turn[name] = (turn.get(name) or "") + text
        if turn["content"] is None and "tool_calls" not in turn:
            turn["content"] = ""
        return [turn]

    # -- items ---------------------------------------------------------------------------------

    def _part(self, part: Part, logprobs: list[TokenLogprobs]) -> None:
        if part.kind == "call":
            if part.id is not None:
                self._close("completed")
                self._open_call(part.id, part.name or "")
            self._texts.append(part.text)
            if part.text:
                self._send(
                    "response.function_call_arguments.delta", **self._place(), delta=part.text
                )
            return
        if self._kind != part.kind:
            self._close("completed")
            self._open_text(part.kind)
        self._texts.append(part.text)
        more: dict[str, Any] = {}
        if part.kind == "content":
            shown = [self._logprob(one) for one in logprobs] if self._has_logprobs else []
            self._logprobs += shown
            more["logprobs"] = shown
        self._send(
            f"{_TEXTS[part.kind]}.delta", **self._place(), content_index=0, delta=part.text, **more
        )

    def _open_call(self, call_id: str, name: str) -> None:
        self._kind = "call"
        self._open = {
            "type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call_id, "name": name,
            "arguments": "", "status": "in_progress",
        }  # fmt: skip
        self._begin_item()

    def _open_text(self, kind: str) -> None:
        self._kind = kind
        content: list[dict[str, Any]] = []
        if kind == "content":
            self._open = {
                "type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant",
                "status": "in_progress", "content": content,
            }  # fmt: skip
        else:
            self._open = {
                "type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": content,
                "status": "in_progress",
            }  # fmt: skip
        self._begin_item()
        self._send(
            "response.content_part.added",
            **self._place(),
            content_index=0,
            part=self._text_part(""),
        )

    def _begin_item(self) -> None:
        assert self._open is not None
        self.answer.output.append(self._open)
        place = len(self.answer.output) - 1
        self._send("response.output_item.added", output_index=place, item=self._open)

    def _close(self, status: str) -> None:
        """Ends the item that is being written, if there is one."""
        if self._open is None:
            return
        text = "".join(self._texts)
        if self._kind == "call":
            self._open["arguments"] = text
            self._send(
                "response.function_call_arguments.done",
                **self._place(), name=self._open["name"], arguments=text,
            )  # fmt: skip
        else:
            part = self._text_part(text)
            more = {"logprobs": self._logprobs} if self._kind == "content" else {}
            where = {**self._place(), "content_index": 0}
            self._send(f"{_TEXTS[self._kind]}.done", **where, text=text, **more)
            self._send("response.content_part.done", **where, part=part)
            self._open["content"] = [part]
        self._open["status"] = status
        place = len(self.answer.output) - 1
        self._send("response.output_item.done", output_index=place, item=self._open)
        self._open, self._kind, self._texts, self._logprobs = None, "", [], []

    def _text_part(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.answer.output) - 1}

    def _logprob(self, one: TokenLogprobs) -> dict[str, Any]:
        top = [self._one(token, value) for token, value in one.top]
        return {**self._one(one.token_id, one.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = text_of(self._tokenizing, token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}

    # -- events --------------------------------------------------------------------------------

    def _send(self, type: str, **fields: Any) -> None:
        if self.generation.stream:
            event = {"type": type, "sequence_number": self._number, **fields}
            self._events.append(
                b"event: " + type.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
            )
        self._number += 1

    def _taken(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def _begun(asked: Asked, model: str) -> ResponseAnswer:
    """Returns the response before its first token, with the request's parameters."""
    body, sampling = asked.body, asked.generation.sampling
    text = msgspec.to_builtins(body.text) if body.text is not None else {}
    form = {name: value for name, value in (text.get("format") or {}).items() if value is not None}
    choice: Any = body.tool_choice if body.tool_choice is not None else "auto"
    if not isinstance(choice, str):
        choice = _without_none(msgspec.to_builtins(choice))
    effort = None if body.reasoning is None else body.reasoning.effort
    tools = [
        {"strict": None, "parameters": None, **_without_none(msgspec.to_builtins(tool))}
        for tool in body.tools or ()
    ]
    return ResponseAnswer(
        id=f"resp_{asked.generation.request_id or uuid.uuid4().hex}",
        created_at=int(time.time()),
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": effort, "summary": None},
        store=asked.keeps,
        temperature=sampling.temperature,
        text={"format": form or {"type": "text"}},
        tool_choice=choice,
        tools=copy.deepcopy(tools),
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        metadata=dict(body.metadata or {}),
    )


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
