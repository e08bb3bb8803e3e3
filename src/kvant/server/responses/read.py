"""Converts the body of /v1/responses to a `Generation`, by way of a request of OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvant.sampling.sampling_params import PARAMS
from kvant.server.api_error import bad_request, shown
from kvant.server.config import Limits
from kvant.server.parameters import RESPONSES, TEXT_TYPES
from kvant.server.requests import (
    Facts,
    Generation,
    check_model,
    function_tool,
    needed,
    parse,
    read_conversation,
)
from kvant.server.responses.wire import Content, Item, ResponseBody, Tool, ToolChoice
from kvant.server.unserved import refuse_unserved

Message = dict[str, Any]
"""A message in the form of /v1/chat/completions."""

LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of a chat request's fields -> their names in this endpoint's body, for error messages."""
_SAME = frozenset(PARAMS) & frozenset(ResponseBody.__struct_fields__) | {
    "model", "metadata", "chat_template_kwargs", "cache_salt", "request_id", "stream",
    "parallel_tool_calls",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request. messages: of this turn. items: its input, as GET .../input_items shows it.

    keeps: the answer will be stored.
    """

    body: ResponseBody
    generation: Generation
    messages: tuple[Message, ...]
    items: tuple[dict[str, Any], ...]
    keeps: bool


def parse_response(data: bytes) -> tuple[ResponseBody, dict[str, Any]]:
    """Parses a body. Returns it typed and as JSON. Raises ApiError 400 for a wrong or unknown field."""
    body, raw = parse(data, ResponseBody)
    refuse_unserved(raw, ResponseBody, RESPONSES)
    return body, raw


def read_response(
    body: ResponseBody,
    raw: dict[str, Any],
    history: Sequence[Message],
    limits: Limits,
    facts: Facts,
    *,
    can_store: bool,
) -> Asked:
    """Checks a body and converts it. history: messages of earlier responses. Raises ApiError 400."""
    check_model(body.model, facts)
    _check(body, can_store=can_store)
    items = _items(body.input)
    told = messages_of(items)
    before = [] if body.instructions is None else [_message("system", body.instructions)]
    chat = {
        **{name: raw[name] for name in _SAME & raw.keys()},
        "messages": [*before, *history, *told],
        **_tools(body),
    }
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if (form := _format(body)) is not None:
        chat["response_format"] = form
    return Asked(
        body,
        read_conversation(chat, limits, facts, names=_NAMES),
        tuple(told),
        tuple(_shown_item(item, raw_item) for item, raw_item in zip(items, _raw(raw), strict=True)),
        can_store and body.store is not False,
    )


def _check(body: ResponseBody, *, can_store: bool) -> None:
    """Raises ApiError 400 for values and combinations that are not offered."""
    for name in body.include or ():
        if name not in _INCLUDES:
            raise bad_request(f"include: {shown(name)!r} is not offered by this server", "include")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise bad_request(f"top_logprobs needs include to have {LOGPROBS!r}", "top_logprobs")
    if body.truncation == "auto":
        raise bad_request("truncation: auto is not offered; inputs are never cut", "truncation")
    if body.store and not can_store:
        raise bad_request("this server stores no responses (--max-stored-responses 0)", "store")
    if body.background and (body.stream or body.store is False or not can_store):
        raise bad_request(
            "background needs store, and does not stream: read the response later", "background"
        )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    for name in ("summary", "generate_summary"):
        if body.reasoning is not None and getattr(body.reasoning, name) not in (None, "auto"):
            raise bad_request(
                f"reasoning.{name} is not offered: the reasoning itself is returned",
                f"reasoning.{name}",
            )
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise bad_request("text.verbosity is not offered by this server", "text.verbosity")


# -- items -------------------------------------------------------------------------------------


def _items(given: str | list[Item]) -> list[Item]:
    if isinstance(given, str):
        return [Item(role="user", content=given)]
    if not given:
        raise bad_request("input is empty", "input")
    return given


def _raw(raw: dict[str, Any]) -> list[dict[str, Any]]:
    given = raw["input"]
    return [{}] if isinstance(given, str) else given


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Returns the items as messages. Reasoning, text and calls of one turn become one message."""
    found: list[Message] = []
    turn: Message | None = None  # the assistant's message that later items may extend

    def own() -> Message:
        nonlocal turn
        if turn is None:
            turn = {"role": "assistant", "content": None}
            found.append(turn)
        return turn

    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.type or "message"
        if kind == "message":
            if item.role is None:
                raise bad_request(f"{where}.role: this field is required", f"{where}.role")
            text = _text(item.content, f"{where}.content")
            if item.role != "assistant":
                found.append(_message(item.role, text))
                turn = None
                continue
            if turn is not None and (turn["content"] is not None or "tool_calls" in turn):
                turn = None
            own()["content"] = text
        elif kind == "reasoning":
            if turn is not None and (turn["content"] is not None or "tool_calls" in turn):
                turn = None
            parts = item.content if isinstance(item.content, list) else item.summary
            text = _text(parts or [], f"{where}.content")
            own()["reasoning_content"] = text
        elif kind == "function_call":
            call_id, name = needed(item, "call_id", where), needed(item, "name", where)
            function = {"name": name, "arguments": item.arguments or "{}"}
            call = {"id": call_id, "type": "function", "function": function}
            own().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = needed(item, "call_id", where)
            text = _text(item.output, f"{where}.output")
            found.append({"role": "tool", "tool_call_id": call_id, "content": text})
            turn = None
        elif kind == "item_reference":
            raise bad_request(
                f"{where}: references to items are not offered; send the item, or "
                "previous_response_id",
                f"{where}.type",
            )
        else:
            raise bad_request(
                f"{where}: an item of type {shown(kind)!r} is not offered by this server",
                f"{where}.type",
            )
    return found


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _text(given: str | Sequence[Content] | None, where: str) -> str:
    if given is None:
        raise bad_request(f"{where}: this field is required", where)
    if isinstance(given, str):
        return given
    texts = []
    for place, part in enumerate(given):
        if part.type not in TEXT_TYPES:
            raise bad_request(
                f"a part of type {shown(part.type)!r} is not offered: this server takes text",
                f"{where}[{place}].type",
            )
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            name = f"{where}[{place}].text"
            raise bad_request(f"{name}: this field is required", name)
        texts.append(text)
    return "\n".join(texts)


def _shown_item(item: Item, raw: dict[str, Any]) -> dict[str, Any]:
    """Returns an item of the input as GET .../input_items shows it."""
    if not raw:
        content = [{"type": "input_text", "text": item.content}]
        raw = {"role": "user", "content": content}
    return {"type": "message", **raw}


# -- tools and forms ---------------------------------------------------------------------------


def _tools(body: ResponseBody) -> dict[str, Any]:
    """Returns tools and tool_choice as fields of a chat request."""
    specs = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or ())]
    choice: Any = body.tool_choice
    if isinstance(choice, ToolChoice):
        if choice.type == "function":
            choice = {"type": "function", "function": {"name": choice.name or ""}}
        elif choice.type == "allowed_tools":
            names = {tool.get("name") for tool in choice.tools or ()}
            specs = [spec for spec in specs if spec["function"]["name"] in names]
            if not specs:
                raise bad_request("tool_choice allows no tool that is in tools", "tool_choice")
            choice = choice.mode or "auto"
        else:
            raise bad_request(
                f"tool_choice: type {shown(choice.type)!r} is not offered by this server",
                "tool_choice",
            )
    found: dict[str, Any] = {"tools": specs} if specs else {}
    if choice is not None:
        found["tool_choice"] = choice
    return found


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise bad_request(
            f"{where}: a tool of type {shown(tool.type)!r} is not offered by this server: "
            "declare it as a function, which the client runs",
            f"{where}.type",
        )
    if tool.name is None:
        raise bad_request(f"{where}.name: this field is required", f"{where}.name")
    return function_tool(tool.name, tool.description, tool.parameters, tool.strict)


def _format(body: ResponseBody) -> dict[str, Any] | None:
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"type": "json_object"}
    if given.schema is None:
        raise bad_request("text.format.schema: this field is required", "text.format.schema")
    return {
        "type": "json_schema",
        "json_schema": {"name": given.name or "answer", "schema": given.schema},
    }
