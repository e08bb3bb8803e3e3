"""/v1/messages over HTTP and with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import Server
from tests.server.test_tools import TOOL, tooled

anthropic = pytest.importorskip("anthropic")

__all__ = ["tooled"]
PATH = "/v1/messages"
FUNCTION = TOOL["function"]
ADD = {"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(tooled: Server) -> Iterator[Any]:
    url = f"http://127.0.0.1:{tooled.port}"
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client:
        yield client


def ask(server: Server, **more: Any) -> Any:
    answer = server.post(PATH, {"messages": HELLO, "max_tokens": 12, "temperature": 0, **more})
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"thinking": {"type": "adaptive"}},
        {"tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
         "max_tokens": 900, "temperature": 1.0, "top_k": 5},
        {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 900},
    ],
    ids=("text", "thinking", "any", "named"),
)  # fmt: skip
def test_anthropics_client_gets_the_same_streamed_and_whole(
    client: Any, tooled: Server, more: dict[str, Any]
) -> None:
    extra = {name: more[name] for name in ("temperature", "top_k") if name in more}
    body = {"model": tooled.model.name, "messages": HELLO, "max_tokens": 12, **more}
    body = {name: value for name, value in body.items() if name not in extra}
    body["extra_body"] = extra or {"temperature": 0}
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert (
        kinds.count("content_block_start")
        == kinds.count("content_block_stop")
        == len(final.content)
    )
    assert final.usage.output_tokens > 0
    if "top_k" in more:  # drawn anew
        (block,) = final.content
        assert block.name == "add"
        assert final.stop_reason == "tool_use"
        return
    whole = client.messages.create(**body)
    assert whole.stop_reason == final.stop_reason
    shown = [{**block.model_dump(), "id": None} for block in whole.content]
    streamed = [{**block.model_dump(), "id": None} for block in final.content]
    for block in (*shown, *streamed):
        block.pop("parsed_output", None)
    assert shown == streamed
    if "thinking" in more:
        assert whole.content[0].type == "thinking"
        assert whole.content[0].thinking


def test_a_conversation_with_calls_and_results(client: Any, tooled: Server) -> None:
    talk: Any = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "add", "signature": ""},
            {"type": "tool_use", "id": "abc", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "abc", "content": [{"type": "text", "text": "2"}]},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    counted = client.messages.count_tokens(
        model=tooled.model.name, messages=talk, tools=[ADD], system="Be brief."
    )
    answer = client.messages.create(
        model=tooled.model.name, messages=talk, tools=[ADD], system="Be brief.", max_tokens=2
    )
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    again = client.messages.create(
        model=tooled.model.name, messages=talk, tools=[ADD], system="Be brief.", max_tokens=2
    )
    assert again.usage.cache_read_input_tokens > 0
    chat = [
        {"role": "system", "content": "Be brief."}, *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "abc", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "abc", "content": "2"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    same = tooled.post(
        "/v1/chat/completions", {"messages": chat, "tools": [TOOL], "max_tokens": 1}
    ).json
    assert same["usage"]["prompt_tokens"] == counted.input_tokens


def test_the_last_assistant_message_is_continued(tooled: Server) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "The answer"}]
    path = f"{PATH}/count_tokens"
    continued = tooled.post(path, {"messages": talk}).json["input_tokens"]
    body = {"messages": talk, "continue_final_message": True}
    assert continued == tooled.post("/tokenize", body).json["count"]


def test_stop_sequences_are_named(tooled: Server) -> None:
    text = ask(tooled)["content"][0]["text"]
    stop = text[4:6]
    answer = ask(tooled, stop_sequences=[stop])
    assert answer["stop_reason"] == "stop_sequence"
    assert answer["stop_sequence"] == stop
    assert answer["content"][0]["text"] == text[: text.index(stop)]


def test_forms_are_honoured(tooled: Server) -> None:
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(tooled, output_config=form, max_tokens=200)
    assert set(json.loads(answer["content"][0]["text"])) == {"ok"}


def test_errors_have_anthropics_shape_and_classes(client: Any, tooled: Server) -> None:
    create = client.messages.create
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(model="claude", messages=HELLO, max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        create(model=tooled.model.name, messages=HELLO, max_tokens=10_000)
    assert wrong.value.body["error"]["code"] == "context_length_exceeded"
    for method, path in (("GET", PATH), ("POST", f"{PATH}/count_tokens")):
        body = tooled.send(method, path, b"{").json
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message", "param", "code"}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": 3}, "temperature"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_offered_is_refused_by_its_field(
    tooled: Server, more: dict[str, Any], param: str
) -> None:
    body = {"messages": HELLO, "max_tokens": 4, **more}
    answer = tooled.post(PATH, body)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param


def test_thinking_needs_a_template_that_writes_it(server: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 9}}
    answer = server.post(PATH, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, "thinking")


def test_a_key_is_taken_in_anthropics_header(guarded: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    right = {"Authorization": "", "X-Api-Key": "sesame"}
    assert guarded.send("POST", PATH, body, headers=right).status == 200
    refused = guarded.send("POST", PATH, body, headers={"Authorization": "Bearer wrong"})
    assert refused.status == 401
    assert refused.json["error"]["type"] == "authentication_error"
