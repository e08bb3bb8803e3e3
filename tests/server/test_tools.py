"""Tools and reasoning over HTTP, with a model whose template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.server.harness import Server, build_model, events

CHAT = "/v1/chat/completions"
TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>\
{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
HELLO = [{"role": "user", "content": "hello"}]
NAMED = {"type": "function", "function": {"name": "add"}}


def build_tooled(directory: Path, *, thinks: bool = False) -> Path:
    """A model whose template takes tools. thinks: it has tokens around its thinking."""
    path = build_model(directory, fills=thinks)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # so that a bias can ask for a call
        text = (path / name).read_text().replace("<|pad|>", "<tool_call>")
        if thinks:
            text = text.replace("<|fim_prefix|>", "<think>").replace("<|fim_suffix|>", "</think>")
        (path / name).write_text(text)
    return path


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(build_tooled(tmp_path_factory.mktemp("tooled"))) as server:
        yield server


def ask(server: Server, **more: Any) -> Any:
    body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 900, "seed": 1, **more}
    answer = server.post(CHAT, body)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_a_forced_call_comes_whole_and_in_parts(tooled: Server, choice: Any) -> None:
    choice_ = ask(tooled, tool_choice=choice, parallel_tool_calls=False)["choices"][0]
    assert choice_["finish_reason"] == "tool_calls"
    assert choice_["message"]["content"] is None
    (call,) = choice_["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].isalnum()
    assert call["function"]["name"] == "add"
    assert set(json.loads(call["function"]["arguments"])) == {"a"}

    body = {
        "messages": HELLO, "tools": [TOOL], "max_tokens": 900, "seed": 1, "stream": True,
        "tool_choice": choice, "parallel_tool_calls": False,
    }  # fmt: skip
    chunks = events(tooled.post(CHAT, body).body)
    parts = [p for k in chunks for c in k["choices"] for p in c["delta"].get("tool_calls", ())]
    assert parts[0]["function"]["name"] == "add"
    assert {part["index"] for part in parts} == {0}
    assert sum("id" in part for part in parts) == 1
    joined = "".join(part["function"]["arguments"] for part in parts)
    assert json.loads(joined) == json.loads(call["function"]["arguments"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_arguments_of_a_named_call_are_streamed(tooled: Server) -> None:
    """Long ones: tokens that arrive together are sent together."""
    parameters = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "minLength": 300, "maxLength": 320, "pattern": "^[a-z]*$"}
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {**TOOL["function"], "parameters": parameters}}
    body = {
        "messages": HELLO, "tools": [tool], "max_tokens": 900, "seed": 1, "stream": True,
        "tool_choice": NAMED, "parallel_tool_calls": False,
    }  # fmt: skip
    chunks = events(tooled.post(CHAT, body).body)
    parts = [p for k in chunks for c in k["choices"] for p in c["delta"].get("tool_calls", ())]
    assert len(parts) > 1
    assert len(json.loads("".join(part["function"]["arguments"] for part in parts))["a"]) >= 300


STRICT: dict[str, Any] = {"type": "function", "function": {**TOOL["function"], "strict": True}}
CALL, END = 0, 2
"""Tokens: a call's mark, and the end of the answer."""


@pytest.mark.parametrize("seed", range(3))
def test_a_strict_tool_holds_where_the_model_decides_to_call(tooled: Server, seed: int) -> None:
    """A bias makes the random model call; only the grammar makes it fit the schema."""
    body = {
        "messages": HELLO, "tools": [STRICT], "max_tokens": 300, "seed": seed, "temperature": 1,
        "parallel_tool_calls": False, "logit_bias": {CALL: 100, END: 50},
    }  # fmt: skip
    answer = tooled.post(CHAT, body)
    assert answer.status == 200, answer.body
    found = answer.json["choices"][0]
    (call,) = found["message"]["tool_calls"]
    assert found["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "add"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"a"}
    assert 0 <= arguments["a"] <= 9

    chunks = events(tooled.post(CHAT, {**body, "stream": True}).body)
    parts = [p for k in chunks for c in k["choices"] for p in c["delta"].get("tool_calls", ())]
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == arguments
    assert parts[0]["function"]["name"] == "add"


def test_a_form_of_the_answer_stands_beside_strict_tools(tooled: Server) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    body = {
        "messages": HELLO, "tools": [STRICT], "max_tokens": 200, "seed": 1, "response_format": form,
        "parallel_tool_calls": False,
    }  # fmt: skip
    text = tooled.post(CHAT, {**body, "logit_bias": {CALL: -100}}).json["choices"][0]["message"]
    assert json.loads(text["content"]).keys() == {"ok"}
    called = tooled.post(CHAT, {**body, "logit_bias": {CALL: 100, END: 50}}).json["choices"][0]
    assert called["finish_reason"] == "tool_calls"


def test_a_strict_tool_leaves_text_free(tooled: Server) -> None:
    body = {"messages": HELLO, "tools": [STRICT], "max_tokens": 20, "seed": 1}
    free = tooled.post(CHAT, {**body, "logit_bias": {CALL: -100}}).json["choices"][0]
    assert free["finish_reason"] in ("length", "stop")
    assert "tool_calls" not in free["message"]
    assert free["message"]["content"]


def test_strict_arguments_are_streamed_as_they_come(tooled: Server) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 300, "maxLength": 320}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {**STRICT["function"], "parameters": parameters}}
    body = {
        "messages": HELLO, "tools": [tool], "max_tokens": 1500, "seed": 1, "stream": True,
        "parallel_tool_calls": False, "logit_bias": {CALL: 100, END: 50},
    }  # fmt: skip
    chunks = events(tooled.post(CHAT, body).body)
    parts = [p for k in chunks for c in k["choices"] for p in c["delta"].get("tool_calls", ())]
    assert len(parts) > 1
    assert len(json.loads("".join(part["function"]["arguments"] for part in parts))["a"]) >= 300


def test_the_other_wire_forms_take_strict_tools(tooled: Server) -> None:
    function = STRICT["function"]
    asked = {"input": "hello", "tools": [{"type": "function", **function}], "max_output_tokens": 9}
    assert tooled.post("/v1/responses", asked).status == 200
    tool = {"name": "add", "input_schema": function["parameters"], "strict": True}
    answer = tooled.post("/v1/messages", {"messages": HELLO, "tools": [tool], "max_tokens": 9})
    assert answer.status == 200, answer.body


def test_tools_reach_the_template_only_where_they_may_be_called(tooled: Server) -> None:
    plain = tooled.post(CHAT, {"messages": HELLO, "max_tokens": 1}).json["usage"]["prompt_tokens"]
    told = ask(tooled, tool_choice="auto", max_tokens=1)["usage"]["prompt_tokens"]
    none = ask(tooled, tool_choice="none", max_tokens=1)["usage"]["prompt_tokens"]
    assert told > plain == none


def test_a_conversation_with_calls_and_results_is_rendered(tooled: Server) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": "2"},
    ]
    tokens = tooled.post("/tokenize", {"messages": talk}).json["tokens"]
    text = tooled.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in text
    assert "<|im_start|>tool\n2<|im_end|>" in text


def test_thinking_that_the_template_opened_is_reasoning(tooled: Server) -> None:
    body = {
        "messages": HELLO, "max_tokens": 8, "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    message = tooled.post(CHAT, body).json["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] != ""
    assert message["content"] == ""
    chunks = events(tooled.post(CHAT, {**body, "stream": True}).body)
    deltas = [c["delta"] for k in chunks for c in k["choices"]]
    assert "".join(d.get("reasoning", "") for d in deltas) == message["reasoning"]
    hidden = tooled.post(CHAT, {**body, "include_reasoning": False}).json["choices"][0]["message"]
    assert "reasoning" not in hidden


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": "required", "min_tokens": 2}, "min_tokens"),
        ({"tools": [STRICT], "guided_regex": "a"}, "tools"),
        ({"tools": [STRICT], "ignore_eos": True}, "ignore_eos"),
        ({"tools": [STRICT], "add_generation_prompt": False}, "tools"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [
                {"function": {"name": "add", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_field(
    tooled: Server, more: dict[str, Any], param: str
) -> None:
    answer = tooled.post(CHAT, {"messages": HELLO, "tools": [TOOL], "max_tokens": 9, **more})
    assert answer.status == 400
    assert answer.error["param"] == param


def test_openais_own_client_gets_its_call(tooled: Server) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{tooled.port}/v1", api_key="x", max_retries=0)
    with client:
        answer = client.chat.completions.create(
            model=tooled.model.name,
            messages=HELLO,  # type: ignore[arg-type]
            tools=[TOOL],  # type: ignore[list-item]
            tool_choice="required",
            max_tokens=900,
        )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].type == "function"
    assert calls[0].function.name == "add"


def test_a_model_without_a_tool_template_says_so(server: Server) -> None:
    answer = server.post(CHAT, {"messages": HELLO, "tools": [TOOL]})
    assert answer.status == 400
    assert answer.error["param"] == "tools"
    assert "takes no tools" in answer.error["message"]
    assert answer.error["message"].endswith("with response_format")


def test_the_way_out_of_tools_has_each_endpoints_own_name(server: Server) -> None:
    tool = {"name": "add", "input_schema": {"type": "object"}}
    body = {"messages": HELLO, "tools": [tool], "max_tokens": 4}
    answer = server.post("/v1/messages", body)
    assert answer.status == 400
    assert answer.json["error"]["message"].endswith("with output_config.format")
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    del body["tools"]
    assert server.post("/v1/messages", {**body, "output_config": form}).status == 200
    function = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    answer = server.post("/v1/responses", {"input": "hi", "tools": [function]})
    assert answer.status == 400
    assert answer.error["message"].endswith("with text.format")


def test_tokenize_counts_tools_as_a_conversation_has_them(tooled: Server) -> None:
    body = {"messages": HELLO, "tools": [TOOL]}
    found = tooled.post("/tokenize", body).json
    rendered = tooled.post(f"{CHAT}/render", {**body, "max_tokens": 1}).json
    assert found["tokens"] == rendered["token_ids"]
    assert found["token_strs"] is None
    alone = tooled.post("/tokenize", {"messages": HELLO}).json
    assert found["count"] > alone["count"]
    twice = tooled.post("/tokenize", {**body, "tools": [TOOL, TOOL]})
    assert (twice.status, twice.error["param"]) == (400, "tools")
