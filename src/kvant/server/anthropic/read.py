"""Converts the body of /v1/messages to a `Generation`, by way of a request of OpenAI's chat API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvant.server.anthropic.wire import Block, CountBody, MessagesBody, MessagesTool, Turn
from kvant.server.api_error import bad_request, shown
from kvant.server.config import Limits
from kvant.server.parameters import MESSAGES
from kvant.server.reply import writes_reasoning
from kvant.server.requests import (
    Facts,
    Generation,
    check_model,
    function_tool,
    needed,
    parse,
    read_conversation,
)
from kvant.server.unserved import refuse_unserved

_NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Names of a chat request's fields -> their names in this endpoint's body, for error messages."""
_SAME = ("model", "temperature", "top_k", "top_p", "stream", "max_tokens")


def read_messages(data: bytes, limits: Limits, facts: Facts) -> Generation:
    """Reads the body of /v1/messages."""
    body, raw = parse(data, MessagesBody)
    refuse_unserved(raw, MessagesBody, MESSAGES)
    chat = {name: raw[name] for name in _SAME if name in raw}
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    return _read(body, chat, limits, facts)


def read_count(data: bytes, limits: Limits, facts: Facts) -> Generation:
    """Reads the body of /v1/messages/count_tokens."""
    body, raw = parse(data, CountBody)
    refuse_unserved(raw, CountBody, MESSAGES)
    return _read(body, {"model": body.model}, limits, facts)


def _read(body: CountBody, chat: dict[str, Any], limits: Limits, facts: Facts) -> Generation:
    check_model(body.model, facts)
    messages = _messages(body)
    chat |= {"messages": messages, **_tools(body)}
    if messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls") is None:
        chat["continue_final_message"] = True  # the answer continues the assistant's message
    if (form := _format(body)) is not None:
        chat["response_format"] = form
    if body.output_config is not None and body.output_config.effort is not None:
        chat["reasoning_effort"] = body.output_config.effort
    thinks = None if body.thinking is None else body.thinking.type != "disabled"
    if thinks and not writes_reasoning(facts.template or ""):
        raise bad_request("thinking: this model's chat template has no reasoning", "thinking")
    if thinks is not None and "enable_thinking" in (facts.template or ""):
        chat["chat_template_kwargs"] = {"enable_thinking": thinks}
    if body.thinking is not None and body.thinking.type == "enabled":
        chat["thinking_token_budget"] = body.thinking.budget_tokens
    found = read_conversation(chat, limits, facts, names=_NAMES)
    is_hidden = body.thinking is not None and body.thinking.display == "omitted"
    return replace(found, include_reasoning=thinks is not False and not is_hidden)


# -- messages ----------------------------------------------------------------------------------


def _messages(body: CountBody) -> list[dict[str, Any]]:
    if not body.messages:
        raise bad_request("messages is empty", "messages")
    found = []
    if body.system is not None:
        found.append({"role": "system", "content": _text(body.system, "system")})
    for index, turn in enumerate(body.messages):
        found += _turn(turn, f"messages[{index}].content")
    return found


def _turn(turn: Turn, where: str) -> list[dict[str, Any]]:
    """Converts a turn to chat messages: a user's to tool results and text, an assistant's to one message."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for place, block in enumerate(turn.content):
        name = f"{where}[{place}]"
        if block.type == "text":
            texts.append(needed(block, "text", name))
        elif block.type == "thinking" and turn.role == "assistant":
            thoughts.append(needed(block, "thinking", name))
        elif block.type == "redacted_thinking" and turn.role == "assistant":
            raise bad_request(f"{name}: this server cannot read redacted thinking", f"{name}.type")
        elif block.type == "tool_use" and turn.role == "assistant":
            function = {
                "name": needed(block, "name", name),
                "arguments": json.dumps(block.input or {}, ensure_ascii=False),
            }
            calls.append(
                {"id": needed(block, "id", name), "type": "function", "function": function}
            )
        elif block.type == "tool_result" and turn.role == "user":
            text = _text(block.content or "", f"{name}.content")
            if block.is_error:
                text = f"Error: {text}"
            answered = needed(block, "tool_use_id", name)
            results.append({"role": "tool", "tool_call_id": answered, "content": text})
        else:
            raise bad_request(
                f"{name}: a block of type {shown(block.type)!r} is not offered here: "
                "this server takes text, thinking, tool_use and tool_result",
                f"{name}.type",
            )
    message: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return results if results and not texts else [*results, message]


def _text(given: str | Sequence[Block], where: str) -> str:
    if isinstance(given, str):
        return given
    texts = []
    for place, block in enumerate(given):
        name = f"{where}[{place}]"
        if block.type != "text":
            raise bad_request(
                f"{name}: a block of type {shown(block.type)!r} is not offered: this server takes text",
                f"{name}.type",
            )
        texts.append(needed(block, "text", name))
    return "\n".join(texts)


# -- tools and forms ---------------------------------------------------------------------------


def _tools(body: CountBody) -> dict[str, Any]:
    """Returns tools and tool_choice as fields of a chat request."""
    specs = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or ())]
    found: dict[str, Any] = {"tools": specs} if specs else {}
    choice = body.tool_choice
    if choice is None:
        return found
    if choice.type == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name or ""}}
    else:
        found["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _tool(tool: MessagesTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise bad_request(
            f"{where}: a tool of type {shown(tool.type)!r} is not offered by this server: "
            "give its input_schema, and run it in the client",
            f"{where}.type",
        )
    if tool.input_schema is None:
        raise bad_request(f"{where}.input_schema: this field is required", f"{where}.input_schema")
    return function_tool(tool.name, tool.description, tool.input_schema, tool.strict)


def _format(body: CountBody) -> dict[str, Any] | None:
    of_config = None if body.output_config is None else body.output_config.format
    given = of_config or body.output_format
    if given is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.schema}}
