"""Splits the text of one answer into content, reasoning and tool calls, as it comes.

transformers' `ResponseParser` reads the family's format. Where a request forces a call, the answer is
JSON by its form, and the form says what it means.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request says about tools. forced: a call is required: the name of the function, or "" for any.

    specs: in OpenAI's form, as the chat template takes them. parallel: several calls are allowed.
    """

    specs: tuple[dict[str, Any], ...]
    forced: str | None = None
    parallel: bool = True

    @property
    def form(self) -> dict[str, Any]:
        """The JSON schema of an answer that is a forced call."""
        functions = [spec["function"] for spec in self.specs]
        if self.forced:
            return next(_parameters(one) for one in functions if one["name"] == self.forced)
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": one["name"]}, "parameters": _parameters(one)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for one in functions
        ]
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """What a piece of text adds. kind: "content", "reasoning" or "call".

    A call has a number, and with its first part an id and a name; text is its arguments.
    """

    kind: str
    text: str
    number: int = 0
    id: str | None = None
    name: str | None = None


class ReplyReader:
    """Reads one answer. prefix: the rendered prompt, which may have opened the reasoning already."""

    def __init__(self, format: dict[str, Any] | None, tools: Tools | None, prefix: str) -> None:
        self._tools = tools
        self._forced = None if tools is None else tools.forced
        self._text: list[str] = []  # of a forced call
        self._num_calls = 0
        self._trims = {"content": _Trim(), "reasoning": _Trim()}
        self._parser: Any = None
        if self._forced is None and format is not None:
            from transformers.utils.chat_parsing import ResponseParser

            anchor = format["start_anchor"]
            anchors = [anchor] if isinstance(anchor, str) else anchor
            start = max((prefix.rfind(one) for one in anchors), default=-1)
            specs: list[Any] | None = list(tools.specs) if tools is not None else None
            self._parser = ResponseParser(format, prefix[start:] if start >= 0 else "", tools=specs)

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str) -> list[Part]:
        """Returns what this piece of the answer shows."""
        if self._forced:
            first = self._num_calls == 0
            if not text:
                return []
            self._num_calls = 1
            return [
                Part("call", text, 0, _new_id() if first else None, self._forced if first else None)
            ]
        if self._forced is not None:
            self._text.append(text)
            return []
        if self._parser is None:
            return [Part("content", text)] if text else []
        return list(self._parts(self._parsed(lambda parser: parser.feed(text), text)))

    def finish(self) -> list[Part]:
        """Returns what the end of the answer shows."""
        if self._forced == "":
            return self._forced_calls("".join(self._text))
        if self._parser is None:
            return []
        return list(self._parts(self._parsed(lambda parser: parser.finalize()[1], "")))

    def _parsed(self, read: Any, text: str) -> list[dict[str, Any]]:
        try:
            events: list[dict[str, Any]] = read(self._parser)
            return events
        except (ValueError, KeyError):
            _log.warning("an answer does not have the form of its family; it is shown as it is")
            self._parser = None
            return [{"type": "region_chunk", "field": "content", "text": text, "dirty": False}]

    def _parts(self, events: Sequence[dict[str, Any]]) -> Iterator[Part]:
        for event in events:
            field = event["field"]
            if event["type"] == "region_close" and field == "tool_calls":
                yield from self._calls(event["value"])
            elif event["type"] == "region_chunk" and not event["dirty"]:
                kind = "content" if field == "content" else "reasoning"
                if text := self._trims[kind].push(event["text"]):
                    yield Part(kind, text)

    def _calls(self, value: Any) -> Iterator[Part]:
        """A call, several, or text that was meant to be one."""
        function = value.get("function") if isinstance(value, dict) else None
        for one in function if isinstance(function, list) else [function]:
            name = one.get("name") if isinstance(one, dict) else None
            arguments = None
            if isinstance(one, dict):
                arguments = one.get("arguments", one.get("parameters", {}))
            if not isinstance(name, str) or not isinstance(arguments, dict):
                if text := self._trims["content"].push(_raw(one)):
                    yield Part("content", text)
            elif self._tools is not None and (self._tools.parallel or self._num_calls == 0):
                yield self._call(name, arguments)

    def _call(self, name: str, arguments: Any) -> Part:
        number, self._num_calls = self._num_calls, self._num_calls + 1
        text = json.dumps(arguments, ensure_ascii=False)
        return Part("call", text, number, _new_id(), name)

    def _forced_calls(self, text: str) -> list[Part]:
        try:
            calls = json.loads(text)
        except ValueError:  # max_tokens cut it
            return [Part("content", text)] if text else []
        return [self._call(call["name"], call["parameters"]) for call in calls]


class _Trim:
    """Takes the blanks from both ends of a text that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        body = text.rstrip()
        self._held = text[len(body) :]
        self._begun = self._begun or bool(body)
        return body


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _new_id() -> str:
    """Nine letters and digits: Mistral's templates refuse every other id."""
    return uuid.uuid4().hex[:9]
