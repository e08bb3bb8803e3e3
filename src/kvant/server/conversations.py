"""Reads messages and tools for the chat template, and the forms that enforce calls of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from kvant.errors import RequestError
from kvant.sampling.sampling_params import SamplingParams
from kvant.sampling.structured_outputs import StructuredOutputs
from kvant.server.api_error import as_api_error, bad_request, shown
from kvant.server.call_grammar import TokenId, call_grammar
from kvant.server.checks import at_most
from kvant.server.config import Limits
from kvant.server.generation import Conversation, Facts
from kvant.server.parameters import RESERVED_TEMPLATE_NAMES
from kvant.server.reply import Tools
from kvant.server.unserved import note_ignored
from kvant.server.wire import (
    ChatBody,
    ChatMessage,
    ContentPart,
    MadeCall,
    TokenizeBody,
    ToolSpec,
)

_MOST_TOOLS = 128

BY_FORMAT = "or ask for the form of the answer with response_format"
"""The end of an error; `requests.renamed` replaces the field's name in it."""


def conversation(body: ChatBody | TokenizeBody, facts: Facts) -> Conversation:
    """Returns the messages for the chat template, with text parts joined and role developer as system."""
    if not body.messages:
        raise bad_request("messages is empty", "messages")
    if not facts.has_tokenizer:
        raise bad_request(
            "this model has no tokenizer: use /v1/completions with token ids", "messages"
        )
    found = []
    for index, message in enumerate(body.messages):
        role = "system" if message.role == "developer" else message.role
        text = message.content
        if text is None and (message.tool_calls or message.reasoning_content or message.reasoning):
            text = ""  # an assistant's message that has only a call or reasoning
        one = {"role": role, "content": text if isinstance(text, str) else _joined(text, index)}
        if message.name is not None:
            one["name"] = message.name
        if role in ("assistant", "tool"):
            one |= _tool_fields(message, index, facts)
        found.append(one)
    continues = bool(body.continue_final_message)
    adds = body.add_generation_prompt
    if continues and adds:
        raise bad_request(
            "continue_final_message contradicts add_generation_prompt", "continue_final_message"
        )
    if continues and found[-1]["role"] != "assistant":
        raise bad_request(
            "continue_final_message needs an assistant message at the end", "continue_final_message"
        )
    return Conversation(
        tuple(found), not continues and adds is not False, continues, _variables(body, facts)
    )


def _joined(parts: list[ContentPart] | None, index: int) -> str:
    """Returns the joined text of the parts of message `index`."""
    where = f"messages[{index}].content"
    if parts is None:
        raise bad_request(f"{where}: a text is required", where)
    texts = []
    for place, part in enumerate(parts):
        if part.type != "text":
            raise bad_request(
                f"a part of type {shown(part.type)!r} is not offered: this server takes text",
                f"{where}[{place}].type",
            )
        if part.text is None:
            name = f"{where}[{place}].text"
            raise bad_request(f"{name}: this field is required", name)
        texts.append(part.text)
    return "\n".join(texts)


def _tool_fields(message: ChatMessage, index: int, facts: Facts) -> dict[str, Any]:
    """Returns the fields of message `index` for calls and reasoning, as chat templates read them."""
    where = f"messages[{index}]"
    found: dict[str, Any] = {}
    if message.tool_calls or message.role == "tool":
        name = f"{where}.tool_calls" if message.tool_calls else f"{where}.role"
        _require_tool_template(facts, name)
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [
            _call_fields(call, f"{where}.tool_calls[{place}]") for place, call in calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    return found


def _call_fields(call: MadeCall, where: str) -> dict[str, Any]:
    """Returns a call with its arguments as an object, since chat templates write the JSON themselves."""
    name = f"{where}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise bad_request(f"{name}: this is not valid JSON", name) from None
    if not isinstance(arguments, dict):
        raise bad_request(f"{name}: this is not a JSON object", name)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def _require_tool_template(facts: Facts, param: str) -> None:
    if "tools" not in (facts.template or ""):
        raise bad_request(
            f"{param}: this model's chat template takes no tools: serve a model whose template does, "
            f"{BY_FORMAT}",
            param,
        )


def _variables(body: ChatBody | TokenizeBody, facts: Facts) -> dict[str, Any]:
    """Returns the template's variables. Refuses reasoning_effort if the template does not read it."""
    given = dict(body.chat_template_kwargs or {})
    for name in RESERVED_TEMPLATE_NAMES & given.keys():
        raise bad_request(
            f"chat_template_kwargs cannot set {name}: the server sets it", "chat_template_kwargs"
        )
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        if "reasoning_effort" not in (facts.template or ""):
            raise bad_request(
                "this model's chat template does not read reasoning_effort", "reasoning_effort"
            )
        given["reasoning_effort"] = body.reasoning_effort
    ignored = [name for name in given if name not in (facts.template or "")]
    note_ignored(f"chat_template_kwargs.{name}" for name in ignored)
    return {**facts.template_values, **given}


def read_tools(body: ChatBody, facts: Facts) -> Tools | None:
    """Returns the tools that the answer may call, or None. Raises ApiError 400."""
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise bad_request("tool_choice is none, auto, required or a function", "tool_choice")
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        at_most(len(body.tools), _MOST_TOOLS, "tools", "functions")
        return None
    specs = tool_specs(body.tools, facts)
    names = [tool.function.name for tool in body.tools]
    forced = None
    if not isinstance(choice, str) and choice is not None:
        forced = choice.function.name
        if forced not in names:
            raise bad_request("tool_choice names a function that is not in tools", "tool_choice")
    elif choice == "required":
        forced = ""
    if forced is None and facts.reply is None:
        raise bad_request(
            "the format in which this model calls tools is not known here; tool_choice required, or "
            "a function, works",
            "tools",
        )
    return Tools(specs, forced, body.parallel_tool_calls is not False)


def tool_specs(tools: Sequence[ToolSpec], facts: Facts) -> tuple[dict[str, Any], ...]:
    """Returns the tools as chat templates take them. Raises ApiError 400."""
    at_most(len(tools), _MOST_TOOLS, "tools", "functions")
    _require_tool_template(facts, "tools")
    if len({tool.function.name for tool in tools}) < len(tools):
        raise bad_request("tools name a function twice", "tools")
    return tuple(_without_none(msgspec.to_builtins(tool)) for tool in tools)


def _without_none(value: Any) -> Any:
    """Returns an object without its null fields, which chat templates would write out."""
    if not isinstance(value, dict):
        return value
    return {name: _without_none(inner) for name, inner in value.items() if inner is not None}


def function_tool(
    name: str, description: str | None, parameters: object, strict: bool | None
) -> dict[str, object]:
    """Returns a function as a tool of a chat request."""
    function = {
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    return {"type": "function", "function": function}


def forced_form(tools: Tools, sampling: SamplingParams, limits: Limits) -> StructuredOutputs:
    """Returns the form of an answer that must call a tool. Raises ApiError 400."""
    check_alone(sampling, "tool_choice", "tool_choice")
    _check_parameters(tools, limits)
    return _tools_form(limits, json=json.dumps(tools.form))


def strict_form(
    tools: Tools,
    rendered: str,
    token_id: TokenId,
    facts: Facts,
    limits: Limits,
    otherwise: StructuredOutputs | None,
) -> StructuredOutputs:
    """Returns the form of an answer that may call strict tools. rendered: the conversation as text.
    otherwise: the form of an answer without a call, or None.

    Raises ApiError 400 if the model's way of writing calls cannot be enforced.
    """
    assert facts.reply is not None
    _check_parameters(tools, limits)
    schema = None if otherwise is None else otherwise.schema
    grammar = call_grammar(facts.reply, tools, rendered, token_id, schema=schema)
    return _tools_form(limits, grammar=grammar, with_thinking=True)


def _check_parameters(tools: Tools, limits: Limits) -> None:
    """Raises ApiError 400 if a function's schema exceeds the limits."""
    for spec in tools.specs:
        if parameters := spec["function"].get("parameters"):
            _tools_form(limits, json=parameters)


def _tools_form(limits: Limits, **form: Any) -> StructuredOutputs:
    try:
        found = StructuredOutputs(**form, asked_as="tools")
        found.require_within(limits.form)
    except RequestError as fault:
        raise as_api_error(fault) from None
    return found


def check_alone(sampling: SamplingParams, what: str, param: str) -> None:
    """Raises ApiError 400 if another parameter contradicts enforced calls. what: names them in the error."""
    if sampling.structured_outputs is not None:
        form = sampling.structured_outputs.asked_as
        raise bad_request(f"{what} contradicts a form of the answer: leave {form} out", param)
    for name in ("min_tokens", "ignore_eos"):
        if getattr(sampling, name):
            raise bad_request(f"{name} contradicts {what}", name)
