"""Writes the grammar of answers that may call strict tools: free text until a call begins, then the call.

Each model family writes calls in its own form and has its own line in `_STYLES`. The grammar is Lark in
llguidance's dialect. A mark that is one token of the model is matched as that token and as text.
"""

# ruff: noqa: RUF001  DeepSeek's marks have characters of their own

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvant.server import reply
from kvant.server.api_error import ApiError, bad_request
from kvant.server.reply import Tools, inlined

TokenId = Callable[[str], int | None]
"""Returns the id of a text that is one token of the model, or None."""

_ANY = r"(.|\n)*"
_MARK = re.compile(r"(<[^<>\s={}]+>|\[[A-Z_/]+\]|\{\w+\})")
_OF_OBJECTS = {
    "type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions",
}  # fmt: skip
_OF_STRINGS = {"type", "title", "description", "default", "examples"}
_BLANKS = {"x-guidance": {"whitespace_pattern": r"[ \n\t\r]{0,20}"}}


@dataclass(frozen=True, slots=True)
class _Style:
    """The form in which a family writes calls.

    trigger: the mark that begins a call. call: the rest of the call. In it {space} stands for blanks, {name}
    for the function, {json} for its arguments, {whole} for an object with both, whose keys are `keys`, {list}
    for a list of such objects, and {fields} for arguments between marks of their own. field: these marks.
    repeats: more calls with their own triggers may follow directly. text_after: text may follow a call.
    opening, closing: optional marks around all calls. opens_whole: {whole} at the beginning of an answer is
    also a call.
    """

    trigger: str
    call: str
    keys: tuple[str, str] = ("name", "arguments")
    field: tuple[str, str] = ("", "")
    repeats: bool = False
    text_after: bool = False
    opening: str = ""
    closing: str = ""
    opens_whole: bool = False


_BEGIN, _CALLS = "<｜tool▁call▁begin｜>", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_LLAMA_STYLE = _Style("<|python_tag|>", "{whole}", ("name", "parameters"), opens_whole=True)
_STYLES: tuple[tuple[Mapping[str, Any], _Style], ...] = (
    (reply._HERMES, _Style("<tool_call>", "{space}{whole}{space}</tool_call>", text_after=True)),
    (
        reply._QWEN_XML,
        _Style(
            "<tool_call>", "{space}<function={name}>{space}{fields}</function>{space}</tool_call>",
            field=("<parameter={key}>", "</parameter>"), text_after=True,
        ),
    ),
    (
        reply._GLM,
        _Style(
            "<tool_call>", "{space}{name}{space}{fields}</tool_call>",
            field=("<arg_key>{key}</arg_key>{space}<arg_value>", "</arg_value>"), text_after=True,
        ),
    ),
    (reply._MISTRAL, _Style("[TOOL_CALLS]", "{space}{name}[ARGS]{json}", repeats=True)),
    (reply._MISTRAL_LIST, _Style("[TOOL_CALLS]", "{space}{list}")),
    (reply._LLAMA, _LLAMA_STYLE),
    (reply._LLAMA4, _LLAMA_STYLE),
    (
        reply._DEEPSEEK,
        _Style(
            _BEGIN, "{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>",
            repeats=True, opening=_CALLS[0], closing=_CALLS[1],
        ),
    ),
    (
        reply._DEEPSEEK_FENCED,
        _Style(
            _BEGIN, "function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>",
            repeats=True, opening=_CALLS[0], closing=_CALLS[1],
        ),
    ),
)  # fmt: skip


def call_grammar(
    format: Mapping[str, Any],
    tools: Tools,
    rendered: str,
    token_id: TokenId,
    *,
    schema: str | None = None,
) -> str:
    """Returns the grammar of answers to `rendered`, a conversation as text, in the family's format.

    schema: a JSON schema of answers without a call; None leaves them free. Raises ApiError 400 if the
    family's calls have no grammar here, or its form cannot express a tool's schema.
    """
    writer = _Writer(tools, token_id, schema)
    if format is reply._HARMONY and token_id("<|channel|>") is not None:
        return writer.harmony()
    style = next((style for known, style in _STYLES if known is format), None)
    if style is None:
        raise bad_request(
            "strict tools are not offered with tool_choice auto for this model: no grammar describes how "
            "it writes calls. tool_choice required, or a function, enforces the schema; without strict, "
            "the model's own arguments come unchecked",
            "tools",
        )
    if style.opens_whole and schema is not None:
        raise bad_request(
            "strict tools contradict a form of the answer here: this model writes calls as JSON without a "
            "mark. Ask for one of them in a request",
            "tools",
        )
    thinks = format["fields"].get("reasoning_content")
    return writer.answer(style, thinks, is_open=thinks is not None and _opens(rendered, format))


def _opens(rendered: str, format: Mapping[str, Any]) -> bool:
    """Returns whether the rendered conversation ends inside reasoning, so the answer begins there."""
    anchors, thinks = format["start_anchor"], format["fields"]["reasoning_content"]
    begin = max(rendered.rfind(one) for one in ([anchors] if isinstance(anchors, str) else anchors))
    tail = rendered[max(begin, 0) :]
    return tail.rfind(thinks["open"]) > tail.rfind(thinks["close"])


class _Writer:
    """Writes one grammar, collecting its rules."""

    def __init__(self, tools: Tools, token_id: TokenId, schema: str | None) -> None:
        self._functions = [spec["function"] for spec in tools.specs]
        self._parallel = tools.parallel
        self._token_id = token_id
        self._rules: dict[str, str] = {}  # body of a rule -> its name and attribute
        # The form of answers without a call; None leaves text free, also before a call.
        self._form = None if schema is None else f"SPACE {self._json(json.loads(schema))} SPACE"

    # -- answers -------------------------------------------------------------------------------

    def answer(self, style: _Style, thinks: Mapping[str, str] | None, *, is_open: bool) -> str:
        """Returns the grammar of an answer for all families but harmony.

        thinks: the marks of reasoning, if the family has any. is_open: the answer begins inside reasoning.
        """
        plain, thoughts = self._form or "TEXT", ""
        if thinks is not None:
            begin, end = self._before(thinks["open"]), self._until(thinks["close"])
            plain = f"({plain} | {begin} TEXT)"  # or reasoning that max_tokens cuts
            thoughts = f"({begin} {end})*"
        call = self._rule(" | ".join({self._call(style, one): None for one in self._functions}))
        head, trigger = self._before(style.trigger), self._written(style.trigger)
        if style.opening:
            head = f"({head} | {self._before(style.opening)} SPACE {trigger})"
        calls = f"{head} {call}"
        if style.opens_whole:
            begin = self._rule(rf'/\s*\{{\s*"{style.keys[0]}"/', "[lazy]")
            bare = [self._whole(style, one, begin) for one in self._functions]
            body = " | ".join([plain, calls, *bare])
        elif style.text_after and self._form:
            body = f"{thoughts} ({plain} | ({calls}){'+' if self._parallel else ''} SPACE)"
        elif style.text_after and self._parallel:
            segment = self._rule(f"{thoughts.removesuffix('*')} | {calls}" if thoughts else calls)
            body = f"{segment}* {plain}"
        elif style.text_after:
            body = f"{thoughts} ({plain} | {calls} TEXT)"
        else:
            if style.repeats and self._parallel:
                calls += f" (SPACE {trigger} {call})*"
            if style.closing:
                calls += f" (SPACE {self._written(style.closing)})?"
            body = f"{thoughts} ({plain} | {calls})"
        if is_open:
            assert thinks is not None
            body = f"TEXT | {self._until(thinks['close'])} {self._rule(body)}"
        return self._grammar(body)

    def harmony(self) -> str:
        """Returns the grammar of OpenAI's harmony: messages in channels, the last of which may be a call."""
        channel, message = self._written("<|channel|>"), self._written("<|message|>")
        way = f'{channel} ("commentary" | "analysis")'
        form = f'SPACE ({self._written("<|constrain|>")} "json" SPACE)? {message}'
        # Text must not spell out a mark, because it would be read as the mark itself.
        text = self._rules[rf"/{_ANY}/ & ~/{_ANY}<\|(channel|message|start|end)\|>{_ANY}/"] = (
            "PLAIN"
        )
        calls = []
        for one in self._functions:
            name = json.dumps(f" to=functions.{one['name']}")
            calls.append(f"({way} {name} | {name} {way}) {form} {self._arguments(one)}")
        free = '"analysis" | "commentary"' + ("" if self._form else ' | "final"')
        plain = last = self._rule(f"{channel} ({free}) {message} {text}")
        if self._form:
            last = self._rule(f'{channel} "final" {message} {self._form}')
        again = f'{self._written("<|end|><|start|>")} "assistant"'
        return self._grammar(f"({plain} {again})* ({last} | {self._rule(' | '.join(calls))})")

    # -- calls ---------------------------------------------------------------------------------

    def _call(self, style: _Style, function: Mapping[str, Any]) -> str:
        return self._written(
            style.call,
            {
                "{name}": lambda: json.dumps(function["name"]),
                "{json}": lambda: self._arguments(function),
                "{whole}": lambda: self._whole(style, function),
                "{list}": lambda: self._listed(style),
                "{fields}": lambda: self._fields(style, function),
            },
        )

    def _whole(self, style: _Style, function: Mapping[str, Any], begin: str = "") -> str:
        """Returns an object with name and arguments. begin: a rule that replaces the brace and first key."""
        name, arguments = (f'"{key}"' for key in style.keys)
        parts = (":", f'"{function["name"]}"', ",", arguments, ":")
        written = " SPACE ".join(map(json.dumps, parts))
        begin = begin or f'"{{" SPACE {json.dumps(name)}'
        return f'{begin} SPACE {written} SPACE {self._arguments(function)} SPACE "}}"'

    def _listed(self, style: _Style) -> str:
        one = self._rule(" | ".join(self._whole(style, function) for function in self._functions))
        more = f'(SPACE "," SPACE {one})*' if self._parallel else ""
        return f'"[" SPACE {one} {more} SPACE "]"'

    def _arguments(self, function: Mapping[str, Any]) -> str:
        return self._json(_schema(function))

    def _json(self, schema: Mapping[str, Any]) -> str:
        return self._rule(f"%json {json.dumps({**schema, **_BLANKS}, ensure_ascii=False)}")

    # -- arguments between marks of their own --------------------------------------------------

    def _fields(self, style: _Style, function: Mapping[str, Any]) -> str:
        begin, end = style.field
        schema = inlined(_schema(function))
        if not function.get("strict"):
            key = self._rule(r"/[^<>\n]{1,128}/")
            return f"({self._written(begin, {'{key}': lambda: key})} {self._until(end)} SPACE)*"
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if odd := schema.keys() - _OF_OBJECTS:
            raise _cannot(function["name"], odd)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise _cannot(function["name"], ["properties that cannot be read"])
        found = []
        for name, value in properties.items():
            where = f"{function['name']}.{name}"
            if re.search(r"[<>\s]", name):
                raise _cannot(where, ["such a name"])
            head = self._written(begin, {"{key}": partial(json.dumps, name)})
            field = f"{head} {self._value(value, schema, end, where)} SPACE"
            found.append(field if name in required else f"({field})?")
        return " ".join(found)

    def _value(self, value: object, schema: Mapping[str, Any], end: str, where: str) -> str:
        """Returns a value followed by the mark `end`. Text is written bare, anything else as JSON."""
        if not isinstance(value, dict):
            raise _cannot(where, ["no type"])
        kinds, several = value.get("type"), value.get("anyOf")
        if isinstance(kinds, list):
            several = [{**value, "type": kind} for kind in kinds]
        if isinstance(several, list) and several:
            return f"({' | '.join(self._value(one, schema, end, where) for one in several)})"
        choices = value.get("enum", [value["const"]] if "const" in value else None)
        texts = isinstance(choices, list) and all(_is_bare(one) for one in choices)
        if kinds in ("string", None) and choices and texts:
            return f"SPACE ({' | '.join(map(json.dumps, choices))}) SPACE {self._written(end)}"
        if kinds == "string":
            if odd := value.keys() - _OF_STRINGS:
                raise _cannot(where, odd)
            return self._until(end)
        if kinds not in ("integer", "number", "boolean", "null", "object", "array"):
            raise _cannot(where, ["no type"])
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return f"SPACE {self._json({**shared, **value})} SPACE {self._written(end)}"

    # -- Lark ----------------------------------------------------------------------------------

    def _grammar(self, start: str) -> str:
        rules = [f"{name}: {body}" for body, name in self._rules.items()]
        texts = [f"TEXT: /{_ANY}/", r"SPACE: /[ \n\t\r]{0,8}/"]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, *texts])

    def _rule(self, body: str, attribute: str = "") -> str:
        name = self._rules.setdefault(body, f"r{len(self._rules)}{attribute}")
        return name.removesuffix(attribute)

    def _until(self, mark: str) -> str:
        """Returns a rule for text up to the mark, including the mark."""
        found = self._rule(f"TEXT {json.dumps(mark, ensure_ascii=False)}", "[lazy]")
        id = self._token_id(mark)
        return found if id is None else self._rule(f"{found} | TEXT <[{id}]>")

    def _before(self, mark: str) -> str:
        """Returns the text allowed before a mark, and the mark: free text, or blanks if there is a form."""
        return f"SPACE {self._written(mark)}" if self._form else self._until(mark)

    def _written(self, form: str, meant: Mapping[str, Callable[[], str]] | None = None) -> str:
        """Returns a form as Lark, with marks as tokens and `meant` replacing its placeholders."""
        return " ".join(self._piece(part, meant or {}) for part in _MARK.split(form) if part)

    def _piece(self, part: str, meant: Mapping[str, Callable[[], str]]) -> str:
        if part == "{space}":
            return "SPACE"
        if part in meant:
            return meant[part]()
        literal, id = json.dumps(part, ensure_ascii=False), self._token_id(part)
        return literal if id is None or not _MARK.fullmatch(part) else f"(<[{id}]> | {literal})"


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function's arguments: any object if the tool is not strict."""
    empty: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    return (function.get("parameters") or empty) if function.get("strict") else {"type": "object"}


def _is_bare(value: object) -> bool:
    """Returns whether a value is text that can be written without quotes and between blanks."""
    return isinstance(value, str) and value == value.strip() != ""


def _cannot(where: str, odd: Iterable[str]) -> ApiError:
    return bad_request(
        f"strict tools with tool_choice auto: this model writes arguments between marks, and {where} has "
        f"{', '.join(sorted(odd))}, which cannot be enforced there. tool_choice required, or a function, "
        "enforces it",
        "tools",
    )
