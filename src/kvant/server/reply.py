"""Splits the text of one answer into content, reasoning and tool calls, while it streams.

transformers' `ResponseParser` reads the family's format. If a request forces a call, the answer is JSON of a
known schema and is read without the parser. A family is recognised by the markers in its chat template,
because checkpoints of one architecture differ in what they were trained to write.
"""

# ruff: noqa: RUF001  DeepSeek's marks have characters of their own

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_MOST_BRANCHES = 64
_MOST_STEPS = 4
"""Most references followed to a definition, since references may form a cycle."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. forced: the function that must be called, "" for any, None if none must be.

    specs: in OpenAI's form, as the chat template takes them. parallel: several calls are allowed.
    thinks_first: thinking may precede a forced call.
    """

    specs: tuple[dict[str, Any], ...]
    forced: str | None = None
    parallel: bool = True
    thinks_first: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(spec["function"]["name"] for spec in self.specs)

    @property
    def is_strict(self) -> bool:
        """True if no call is forced, but a call's arguments must match their schema."""
        return self.forced is None and any(spec["function"].get("strict") for spec in self.specs)

    @property
    def form(self) -> dict[str, Any]:
        """The JSON schema of a forced call: one function's arguments, or a list of calls of any function."""
        functions = [spec["function"] for spec in self.specs]
        if self.forced:
            return next(_parameters(one) for one in functions if one["name"] == self.forced)
        calls = []
        for place, one in enumerate(functions):
            parameters = rebased(_parameters(one), f"/items/anyOf/{place}/properties/parameters")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": one["name"]}, "parameters": parameters},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}


_OF_NAMES = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_VALUES = frozenset({"const", "enum", "default", "examples"})


def rebased(schema: Any, path: str) -> Any:
    """Returns a schema for use inside another one at a JSON pointer, with its references adjusted."""
    if isinstance(schema, list):
        return [rebased(one, path) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = f"#{path}{value[1:]}"
        elif key in _OF_NAMES and isinstance(value, dict):  # its keys are names, even a key "$ref"
            found[key] = {name: rebased(one, path) for name, one in value.items()}
        else:
            found[key] = value if key in _VALUES else rebased(value, path)
    return found


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
    return found


def _with_types(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool for the parser, which needs the types of arguments and does not follow references."""
    function = spec["function"]
    return {**spec, "function": {**function, "parameters": inlined(_parameters(function))}}


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns an object's schema with references to definitions replaced in its properties."""
    found: dict[str, Any] = _resolved(schema, schema)
    properties = found.get("properties")
    if not isinstance(properties, dict):
        return found
    return {**found, "properties": {key: _resolved(one, schema) for key, one in properties.items()}}


def _resolved(value: Any, schema: dict[str, Any]) -> Any:
    """Returns the schema that a value's references lead to, also for each branch of an anyOf."""
    found = _followed(value, schema)
    several = found.get("anyOf") if isinstance(found, dict) else None
    if not isinstance(several, list):
        return found
    return {**found, "anyOf": [_followed(one, schema) for one in several[:_MOST_BRANCHES]]}


def _followed(value: Any, schema: dict[str, Any]) -> Any:
    for _ in range(_MOST_STEPS):
        path = value.get("$ref") if isinstance(value, dict) else None
        if not isinstance(path, str) or not path.startswith("#/"):
            break
        target: Any = schema
        for step in path[2:].split("/"):
            target = target.get(step) if isinstance(target, dict) else None
        rest = {key: one for key, one in value.items() if key != "$ref"}
        value = {**target, **rest} if isinstance(target, dict) else rest
    return value


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer. kind: "content", "reasoning" or "call".

    number: of the call in the answer. The first part of a call has its id and name. A call's text is a piece
    of its arguments.
    """

    kind: str
    text: str
    number: int = 0
    id: str | None = None
    name: str | None = None


class ReplyReader:
    """Splits one answer into parts. prefix: the rendered prompt, which may already have opened reasoning.

    format: of the model's family, see `reply_format`; None shows the text unchanged.
    """

    def __init__(self, format: dict[str, Any] | None, tools: Tools | None, prefix: str) -> None:
        self._tools = tools
        self._forced = None if tools is None else tools.forced
        self._text: list[str] = []  # the answer so far, if any function must be called
        self._num_calls = 0
        self._trims = {"content": _Trim(), "reasoning": _Trim()}
        self._parser: Any = None
        self._arguments: _Arguments | None = None  # of the call that is being streamed
        if format is not None:
            format = _fitting(format, None if self._forced is not None else tools)
        calls = None if format is None else format["fields"].get("tool_calls")
        self._streams = calls is not None and calls["content"] == "json"
        self._streams &= calls is None or "unquoted_keys" not in calls.get("content_args", {})
        self._is_named = calls is not None and calls["transform"] is _NAMED
        if format is not None and (tools is None or tools.forced is None or tools.thinks_first):
            from transformers.utils.chat_parsing import ResponseParser

            anchor = format["start_anchor"]
            anchors = [anchor] if isinstance(anchor, str) else anchor
            start = max((prefix.rfind(one) for one in anchors), default=-1)
            specs: list[Any] | None = None
            if tools is not None:
                specs = [_with_types(spec) for spec in tools.specs]
            self._parser = ResponseParser(format, prefix[start:] if start >= 0 else "", tools=specs)

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str) -> list[Part]:
        """Reads a piece of the answer. Returns the parts that it completes."""
        parts = [Part("content", text)] if text else []
        if self._parser is not None:
            parts = list(self._parts(self._parsed(lambda parser: parser.feed(text), text)))
        return parts if self._forced is None else self._as_forced(parts)

    def finish(self) -> list[Part]:
        """Ends the answer. Returns the remaining parts."""
        parts: list[Part] = []
        if self._parser is not None:
            parts = list(self._parts(self._parsed(lambda parser: parser.finalize()[1], "")))
        if self._forced is not None:
            parts = self._as_forced(parts)
        if self._forced == "":
            parts += self._forced_calls("".join(self._text))
        return parts

    def _as_forced(self, parts: Sequence[Part]) -> list[Part]:
        """Returns the parts of an answer whose content is a forced call, or a list of any calls."""
        found: list[Part] = []
        for part in parts:
            if part.kind != "content":
                found.append(part)
            elif self._forced:
                is_first, self._num_calls = self._num_calls == 0, 1
                id, name = (_new_id(), self._forced) if is_first else (None, None)
                found.append(Part("call", part.text, 0, id, name))
            else:
                self._text.append(part.text)
                found += self._listed(part.text)
        return found

    def _listed(self, text: str) -> list[Part]:
        """Returns the arguments, in a list of calls, that a piece of the list adds."""
        found: list[Part] = []
        for char in text:
            if self._arguments is None:
                if char != "{":
                    continue
                self._arguments = _Arguments(None)
            call = self._arguments
            if call.ended:  # only the brace of the call itself is missing
                self._arguments = None
            elif piece := call.feed(char):
                if call.number is None:
                    call.number, self._num_calls = self._num_calls, self._num_calls + 1
                    found.append(Part("call", piece, call.number, _new_id(), call.name))
                elif found and found[-1].number == call.number:
                    found[-1] = replace(found[-1], text=found[-1].text + piece)
                else:
                    found.append(Part("call", piece, call.number))
        return found

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
            if field == "tool_calls":
                yield from self._of_call(event)
            elif event["type"] == "region_chunk" and not event["dirty"]:
                kind = "content" if field == "content" else "reasoning"
                if text := self._trims[kind].push(event["text"]):
                    yield Part(kind, text)

    def _of_call(self, event: dict[str, Any]) -> Iterator[Part]:
        """Yields an event's parts inside a call: pieces of its arguments, or the whole call at its end."""
        kind = event["type"]
        if kind == "region_open":
            captured = getattr(self._parser, "_captures", {}).get("name")
            can = self._streams and (captured is not None or not self._is_named)
            self._arguments = _Arguments(captured if self._is_named else None) if can else None
        elif kind == "region_chunk" and self._arguments is not None:
            call = self._arguments
            text = call.feed(event["text"])
            if not text:
                return
            if call.number is not None:
                yield Part("call", text, call.number)
            elif self._tools is None or call.name not in self._tools.names:
                self._arguments = None  # not streamed: the whole call is read at its end
            elif self._tools.parallel or self._num_calls == 0:
                call.number, self._num_calls = self._num_calls, self._num_calls + 1
                yield Part("call", text, call.number, _new_id(), call.name)
        elif kind == "region_close":
            streamed = self._arguments is not None and self._arguments.begun
            self._arguments = None
            if not streamed:
                yield from self._calls(event["value"])

    def _calls(self, value: Any) -> Iterator[Part]:
        """Yields one or several calls; a malformed call becomes content."""
        function = value.get("function") if isinstance(value, dict) else None
        for one in function if isinstance(function, list) else [function]:
            if isinstance(one, dict) and isinstance(one.get("function"), dict):
                one = one["function"]  # OpenAI's form, which Llama sometimes writes
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
        """Returns the calls of a whole list that were not streamed. A list that was cut before its first
        arguments is text.
        """
        try:
            calls = json.loads(text)
        except ValueError:  # max_tokens cut it
            return [Part("content", text)] if text and not self._num_calls else []
        return [self._call(call["name"], call["parameters"]) for call in calls[self._num_calls :]]


_WHOLE_CALL = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MOST_HEAD = 512
"""Characters within which a call's arguments must begin, for the call to be streamed."""


class _Arguments:
    """Extracts one call's arguments from its JSON while it streams. name: from the call's mark; if None, the
    JSON must have the name before the arguments. For another order nothing is streamed, and the whole call is
    read at its end.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.number: int | None = (
            None  # the call's number in the answer, once its first part was shown
        )
        self.begun = self.ended = self._failed = False
        self._head = ""
        self._depth = 0
        self._in_text = self._escaped = False

    def feed(self, text: str) -> str:
        """Reads a piece of the call. Returns the text that it adds to the arguments."""
        if self._failed or self.ended:
            return ""
        if not self.begun:
            self._head += text
            text = self._begin()
        for place, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_text:
                self._escaped = char == "\\"
                self._in_text = char != '"'
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return text[: place + 1]
        return text

    def _begin(self) -> str:
        """Returns the text after the call's head, or "" until the head is complete."""
        if self.name is not None:
            rest = self._head.lstrip()
            self.begun = rest.startswith("{")
            self._failed = bool(rest) and not self.begun
        elif found := _WHOLE_CALL.match(self._head):
            self.name, self.begun = found[1], True
            rest = self._head[found.end() :]
        else:
            rest = ""
            self._failed = len(self._head) > _MOST_HEAD
        return rest if self.begun else ""


class _Trim:
    """Strips the blanks from both ends of a text that streams."""

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
    """Returns an id of nine letters and digits, since Mistral's templates refuse every other form."""
    return uuid.uuid4().hex[:9]


# -- how families write -----------------------------------------------------------------------
#
# Data for `transformers.utils.chat_parsing.ResponseParser`; the first four are transformers' own
# (`transformers.cli.serving`). `allow_non_json` keeps a malformed call as text.

_JSON = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WHOLE = {"type": "function", "function": "{content}"}
_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_CHATML_END = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"}


def _format(anchor: str | list[str], **fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


_CHATML = "<|im_start|>assistant\n"
_HERMES = _format(
    _CHATML,
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", **_JSON, "transform": _WHOLE,
    },
    content=_CHATML_END,
)  # fmt: skip
_QWEN_XML = _format(
    _CHATML,
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        "transform": _NAMED,
    },
    content=_CHATML_END,
)
_GEMMA = _format(
    ["<|turn>model\n", "<tool_response|>"],
    reasoning_content={"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
    tool_calls={
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {
            "unquoted_keys": True,
            "string_delims": [['<|"|>', '<|"|>']],
            "allow_non_json": True,
        },
        "transform": _NAMED,
    },
    content={"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
)
_GLM = _format(
    "<|assistant|>",
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\s<]+)",
        "close": "</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*"
            r"<arg_value>\s*(?P<value>.*?)\s*</arg_value>"
        },
        "transform": _NAMED,
    },
    content={"close": ["<|user|>", "<|observation|>", "<|endoftext|>"], "content": "text"},
)
_HARMONY = _format(
    "<|start|>assistant",
    reasoning_content={
        "open": "<|channel|>analysis<|message|>", "close": ["<|end|>", "<|start|>"],
        "content": "text", "repeats": True, "join": "\n",
    },
    tool_calls={
        "open_pattern": r"(?:<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[\w.-]+)"
        r"|to=functions\.(?P<name>[\w.-]+)<\|channel\|>(?:commentary|analysis))[^<]*"
        r"(?:<\|constrain\|>\w+)?\s*<\|message\|>",
        "close": ["<|call|>", "<|end|>", "<|start|>"],
        **_JSON,
        "transform": _NAMED,
    },
    content={
        "open_pattern": r"<\|channel\|>(?:final|commentary)<\|message\|>",
        "close": ["<|end|>", "<|return|>", "<|start|>"], "content": "text", "repeats": True, "join": "\n",
    },
)  # fmt: skip
_MISTRAL = _format(
    "[/INST]",
    reasoning_content={"open": "[THINK]", "close": "[/THINK]", "content": "text"},
    tool_calls={
        "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])",
        **_JSON,
        "transform": _NAMED,
    },
    content={"close": "</s>", "content": "text"},
)
_MISTRAL_LIST = _format(
    "[/INST]",
    tool_calls={"open": "[TOOL_CALLS]", "close": "</s>", **_JSON, "transform": _WHOLE},
    content={"close": "</s>", "content": "text"},
)
_LLAMA = _format(
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    tool_calls={
        "open_pattern": r"<\|python_tag\|>|\A\s*(?=\{\s*\"name\")",
        "close_pattern": r"<\|eom_id\|>|<\|eot_id\|>",
        **_JSON,
        "transform": _WHOLE,
    },
    content={"close_pattern": r"<\|eom_id\|>|<\|eot_id\|>", "content": "text"},
)
_LLAMA4 = {**_LLAMA, "start_anchor": "<|header_start|>assistant<|header_end|>\n\n"}
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_END = {
    "close": ["<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"], "content": "text",
}  # fmt: skip
_DEEPSEEK = _format(
    "<｜Assistant｜>",
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": rf"\s*(?:<｜tool▁calls▁begin｜>\s*)?{_BEGIN}(?P<name>[^<\n]+){_SEP}",
        "close": _END,
        **_JSON,
        "transform": _NAMED,
    },
    content=_DEEPSEEK_END,
)
_DEEPSEEK_FENCED = _format(
    "<｜Assistant｜>",
    reasoning_content=_THINK,
    tool_calls={
        "open_pattern": rf"\s*(?:<｜tool▁calls▁begin｜>\s*)?{_BEGIN}function{_SEP}"
        r"(?P<name>[^<\n]+)\n```json\n",
        "close_pattern": rf"\n```\s*{_END}",
        **_JSON,
        "transform": _NAMED,
    },
    content=_DEEPSEEK_END,
)

_BY_MARKERS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("<|tool_call>call:",), _GEMMA),
    (("<｜tool▁call▁begin｜>", "```json"), _DEEPSEEK_FENCED),
    (("<｜tool▁call▁begin｜>",), _DEEPSEEK),
    (("<|channel|>", "<|message|>"), _HARMONY),
    (("<tool_call>", "<arg_key>"), _GLM),
    (("<tool_call>", "<function="), _QWEN_XML),
    (("<tool_call>", "<|im_start|>"), _HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL),
    (("[TOOL_CALLS]",), _MISTRAL_LIST),
    (("<|start_header_id|>", "parameters"), _LLAMA),
    (("<|header_start|>", "parameters"), _LLAMA4),
    (("<think>", "<|im_start|>"), _HERMES),
    (("<think>", "<｜Assistant｜>"), _DEEPSEEK),
)
_REASONS = ("<think>", "<|channel|>", "<|channel>", "[THINK]")


def _with(format: dict[str, Any], **changed: Mapping[str, str]) -> dict[str, Any]:
    """Returns a format in which patterns replace the marks of some fields."""
    fields = dict(format["fields"])
    for name, patterns in changed.items():
        marks = {key.removesuffix("_pattern") for key in patterns}
        kept = {key: one for key, one in fields[name].items() if key not in marks}
        fields[name] = {**kept, **patterns}
    return {**format, "fields": fields}


# Models also write calls that deviate from their form. These deviations occur in answers of real models.
_OPENS_LLAMA = r'\A\s*(?=\{\s*(?:"name"|"type"\s*:\s*"function"\s*,\s*"(?:name|function)"))'
_LOOSE: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (  # A call within reasoning ends it. Qwen3-Coder leaves out the first mark after text.
        _QWEN_XML,
        _with(
            _QWEN_XML,
            reasoning_content={"close_pattern": r"</think>|(?=<tool_call>\s*<function=)"},
            tool_calls={
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>"
                r"|(?:\A|\n)\s*<function=(?P<name>[^>\n]+)>",
            },
            content={"close_pattern": r"\s*(?:</think>|<\|im_end\|>|<\|endoftext\|>)"},
        ),
    ),
    (
        _DEEPSEEK,
        _with(
            _DEEPSEEK,
            reasoning_content={"close_pattern": r"</think>|(?=<｜tool▁calls▁begin｜>)"},
        ),
    ),
    (
        _MISTRAL,
        _with(_MISTRAL, reasoning_content={"close_pattern": r"\[/THINK\]|(?=\[TOOL_CALLS\])"}),
    ),
    (
        _LLAMA,
        _with(_LLAMA, tool_calls={"open_pattern": rf"<\|python_tag\|>|{_OPENS_LLAMA}"}),
    ),
    (
        _LLAMA4,
        _with(
            _LLAMA4,
            tool_calls={
                "open_pattern": rf"<\|python_(?:tag|start)\|>|{_OPENS_LLAMA}",
                "close_pattern": r"<\|python_end\|>|<\|eo[mt]\|>|<\|eom_id\|>|<\|eot_id\|>",
            },
        ),
    ),
)


def _fitting(format: dict[str, Any], tools: Tools | None) -> dict[str, Any]:
    """Returns the format for a request: without calls if it has no tools, exact if a grammar enforces it."""
    if tools is None:
        fields = {name: one for name, one in format["fields"].items() if name != "tool_calls"}
        return {**format, "fields": fields}
    if tools.is_strict:
        return format
    return next((loose for exact, loose in _LOOSE if exact is format), format)


def reply_format(template: str) -> dict[str, Any] | None:
    """Returns the response template of a chat template's family, or None for an unknown family."""
    for markers, found in _BY_MARKERS:
        if all(marker in template for marker in markers):
            return found
    return None


def writes_reasoning(template: str) -> bool:
    """Returns whether models with this chat template write reasoning before their answers."""
    return any(marker in template for marker in _REASONS)
