"""Budgets of thinking over HTTP, with a model whose template opens thinking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.tiny_chat import VOCAB
from tests.server.harness import Server, events
from tests.server.test_tools import (
    CALL,
    CHAT,
    END,
    HELLO,
    NAMED,
    STRICT,
    TOOL,
    build_tooled,
    tooled,
)

__all__ = ["tooled"]  # its template reasons, but its thinking has no tokens of its own
OPEN, CLOSE = VOCAB, VOCAB + 1
THINKS: dict[str, Any] = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}
WAITS: dict[str, Any] = {**THINKS, "logit_bias": {CLOSE: -100}, "return_token_ids": True}
"""A request whose thinking ends by a budget only."""
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
          "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(build_tooled(tmp_path_factory.mktemp("thinker"), thinks=True)) as server:
        yield server


def ask(server: Server, **more: Any) -> Any:
    answer = server.post(CHAT, {**WAITS, "max_tokens": 40, "seed": 1, **more})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def streamed(server: Server, **more: Any) -> dict[str, Any]:
    """The joined parts of a stream."""
    body = {**WAITS, "max_tokens": 40, "seed": 1, "stream": True, **more}
    choices = [c for chunk in events(server.post(CHAT, body).body) for c in chunk["choices"]]
    found: dict[str, Any] = {"content": "", "reasoning": "", "arguments": "", "token_ids": []}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning"):
            found[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            found["arguments"] += call["function"]["arguments"]
        found["token_ids"] += choice.get("token_ids") or []
    return found


@pytest.mark.parametrize(
    "name", ["thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"]
)
@pytest.mark.parametrize("budget", [0, 7])
def test_thinking_ends_at_its_budget_streamed_and_whole(
    thinker: Server, name: str, budget: int
) -> None:
    whole = ask(thinker, **{name: budget})
    assert whole["token_ids"].index(CLOSE) == budget
    assert whole["message"]["content"]
    assert (whole["message"].get("reasoning") is None) == (budget == 0)
    parts = streamed(thinker, **{name: budget})
    assert parts["token_ids"] == whole["token_ids"]
    assert parts["content"] == whole["message"]["content"]
    assert parts["reasoning"] == (whole["message"].get("reasoning") or "")


def test_several_answers_and_other_endpoints_keep_the_budget(thinker: Server) -> None:
    body = {**WAITS, "max_tokens": 30, "n": 3, "seed": 2, "thinking_token_budget": 5}
    choices = thinker.post(CHAT, body).json["choices"]
    assert [choice["token_ids"].index(CLOSE) for choice in choices] == [5, 5, 5]
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n"
    answer = thinker.complete(
        rendered,
        thinking_token_budget=3,
        logit_bias={CLOSE: -100},
        return_token_ids=True,
        max_tokens=9,
    )
    assert answer.json["choices"][0]["token_ids"][3] == CLOSE
    unlimited = thinker.complete(rendered, thinking_token_budget=-1, max_tokens=9)
    assert unlimited.json["choices"][0]["text"] == thinker.complete(rendered, max_tokens=9).json[
        "choices"
    ][0]["text"]  # fmt: skip


def test_the_responses_api_counts_thinking_within_the_budget(thinker: Server) -> None:
    body = {
        "input": "hello", "max_output_tokens": 30, "chat_template_kwargs": {"enable_thinking": True},
        "thinking_token_budget": 6, "logit_bias": {CLOSE: -100}, "seed": 1,
    }  # fmt: skip
    answer = thinker.post("/v1/responses", body)
    assert answer.status == 200, answer.body
    kinds = [item["type"] for item in answer.json["output"]]
    assert kinds == ["reasoning", "message"]


def test_anthropics_budget_is_kept(thinker: Server) -> None:
    body = {"messages": HELLO, "max_tokens": 40, "temperature": 0}
    lengths = []
    for budget in (2, 9):
        thinking = {"type": "enabled", "budget_tokens": budget}
        answer = thinker.post("/v1/messages", {**body, "thinking": thinking})
        assert answer.status == 200, answer.body
        thought, text = answer.json["content"]
        assert (thought["type"], text["type"]) == ("thinking", "text")
        lengths.append(len(thought["thinking"]))
    assert lengths[0] <= 2 < lengths[1] <= 9, "each token of this model is a byte"


@pytest.mark.parametrize("budget", [4, None], ids=str)
def test_a_form_begins_behind_thinking(thinker: Server, budget: int | None) -> None:
    """Without a budget too: the form is that of the content, not of the reasoning."""
    likes = {"logit_bias": {CLOSE: 6}, "seed": 3, "max_tokens": 400, "response_format": FORM}
    found = ask(thinker, thinking_token_budget=budget, **likes)
    assert found["finish_reason"] == "stop"
    assert set(json.loads(found["message"]["content"])) == {"ok"}
    assert found["message"]["reasoning"]
    parts = streamed(thinker, thinking_token_budget=budget, **likes)
    assert parts["content"] == found["message"]["content"]
    assert parts["reasoning"] == found["message"]["reasoning"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
def test_a_forced_call_follows_thinking(thinker: Server, choice: Any) -> None:
    asked = {
        "tools": [TOOL], "tool_choice": choice, "thinking_token_budget": 6, "max_tokens": 900,
        "parallel_tool_calls": False,
    }  # fmt: skip
    found = ask(thinker, **asked)
    (call,) = found["message"]["tool_calls"]
    assert found["finish_reason"] == "tool_calls"
    assert set(json.loads(call["function"]["arguments"])) == {"a"}
    assert found["message"]["reasoning"]
    assert found["message"]["content"] is None
    assert found["token_ids"].index(CLOSE) == 6
    assert streamed(thinker, **asked)["arguments"] == call["function"]["arguments"]


def test_a_strict_call_follows_thinking(thinker: Server) -> None:
    found = ask(
        thinker, tools=[STRICT], thinking_token_budget=6, max_tokens=300, parallel_tool_calls=False,
        logit_bias={CLOSE: -100, CALL: 100, END: 50},
    )  # fmt: skip
    assert found["token_ids"].index(CLOSE) <= 6
    (call,) = found["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"a"}


def test_a_form_waits_only_if_the_model_begins_to_think(thinker: Server) -> None:
    """The template opens no thinking here."""
    body = {"messages": HELLO, "response_format": FORM, "max_tokens": 200, "seed": 1}
    unopened = {**body, "logit_bias": {OPEN: -100}}
    message = thinker.post(CHAT, unopened).json["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"ok"}
    assert not message.get("reasoning")
    opened = {**body, "logit_bias": {OPEN: 100}, "thinking_token_budget": 3}
    message = thinker.post(CHAT, opened).json["choices"][0]["message"]
    assert set(json.loads(message["content"])) == {"ok"}
    assert message["reasoning"]


def refusals() -> Iterator[tuple[str, dict[str, Any], str]]:
    for name in ("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens"):
        yield CHAT, {"messages": HELLO, name: 5}, name
    yield "/v1/completions", {"prompt": "a", "thinking_token_budget": 0}, "thinking_token_budget"
    yield "/v1/responses", {"input": "a", "thinking_token_budget": 5}, "thinking_token_budget"
    infill = {"input_prefix": "a", "input_suffix": "", "thinking_token_budget": 5}
    yield "/infill", infill, "thinking_token_budget"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    messages = {"messages": HELLO, "max_tokens": 4, "thinking": thinking}
    yield "/v1/messages", messages, "thinking.budget_tokens"


@pytest.mark.parametrize(("path", "body", "param"), [*refusals()])
def test_a_model_whose_thinking_has_no_marks_refuses_a_budget(
    tooled: Server, path: str, body: dict[str, Any], param: str
) -> None:
    answer = tooled.post(path, body)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param
    assert answer.json["error"]["message"].startswith(param)


def test_wrong_budgets_are_named(thinker: Server) -> None:
    for more, param in (
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"thinking_token_budget": 1, "thinking_budget_tokens": 2}, "thinking_budget_tokens"),
    ):
        answer = thinker.post(CHAT, {**THINKS, **more})
        assert answer.status == 400
        assert answer.error["param"] == param
    thinking = {"type": "enabled", "budget_tokens": -1}
    answer = thinker.post(
        "/v1/messages", {"messages": HELLO, "max_tokens": 9, "thinking": thinking}
    )
    assert answer.status == 400
    assert answer.json["error"]["param"] == "thinking.budget_tokens"
