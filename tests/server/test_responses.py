"""/v1/responses over HTTP and with the official client: whole, streamed, stored and continued."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall

from kvant.server.store import ResponseStore, Stored
from tests.server.harness import Server
from tests.server.test_tools import TOOL, tooled

__all__ = ["tooled"]
PATH = "/v1/responses"
FLAT = {"type": "function", **TOOL["function"]}
NAMED = {"type": "function", "name": "add"}


@pytest.fixture
def client(tooled: Server) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"http://127.0.0.1:{tooled.port}/v1", api_key="x", max_retries=0
    ) as client:
        yield client


def ask(server: Server, **more: Any) -> Any:
    body = {"input": "hello", "max_output_tokens": 12, "temperature": 0, **more}
    answer = server.post(PATH, body)
    assert answer.status == 200, answer.body
    return answer.json


def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, each named as its type and numbered."""
    found = []
    for block in body.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """A response without what each one has for itself."""
    items = [
        {k: v for k, v in one.items() if k not in ("id", "call_id")} for one in answer["output"]
    ]
    usage = {k: v for k, v in answer["usage"].items() if k != "input_tokens_details"}
    skipped = ("id", "created_at", "output", "usage")
    return {
        **{k: v for k, v in answer.items() if k not in skipped}, "output": items, "usage": usage
    }  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"tools": [FLAT], "tool_choice": NAMED, "max_output_tokens": 900, "seed": 1},
        {"tools": [FLAT], "tool_choice": "required", "max_output_tokens": 900, "seed": 1},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ],
    ids=("text", "reasoning", "named", "required", "logprobs"),
)
def test_a_stream_says_what_the_whole_response_says(tooled: Server, more: dict[str, Any]) -> None:
    whole = ask(tooled, **more)
    body = {"input": "hello", "max_output_tokens": 12, "temperature": 0, **more, "stream": True}
    found = events(tooled.post(PATH, body).body)
    assert [one["type"] for one in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] in ("response.completed", "response.incomplete")
    assert comparable(found[-1]["response"]) == comparable(whole)
    open_items: list[int] = []
    texts: dict[int, str] = {}
    for one in found:
        kind = one["type"]
        if kind == "response.output_item.added":
            assert not open_items, "one item after the other"
            open_items.append(one["output_index"])
        elif kind.endswith(".delta"):
            assert one["output_index"] == open_items[0]
            assert one["item_id"]
            texts[open_items[0]] = texts.get(open_items[0], "") + one["delta"]
        elif kind == "response.output_item.done":
            assert one["output_index"] == open_items.pop()
            assert one["item"]["status"] in ("completed", "incomplete")
    assert not open_items
    for index, item in enumerate(found[-1]["response"]["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert texts.get(index, "") == text


def test_openais_client_reads_text_streams_and_usage(client: OpenAI, tooled: Server) -> None:
    more: dict[str, Any] = {
        "model": tooled.model.name, "instructions": "Be brief.", "input": "hello", "temperature": 0,
        "max_output_tokens": 8,
    }  # fmt: skip
    whole: Response = client.responses.create(**more)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8
    assert whole.instructions == "Be brief."
    form: Any = {"format": {"type": "json_object"}}
    with client.responses.stream(**{**more, "max_output_tokens": 900}, text=form) as stream:
        text = "".join(one.delta for one in stream if one.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text
    assert isinstance(json.loads(text), dict)


def test_openais_client_calls_a_function_and_continues(client: OpenAI, tooled: Server) -> None:
    more: dict[str, Any] = {"model": tooled.model.name, "tools": [FLAT], "max_output_tokens": 900}
    first = client.responses.create(
        input=[{"role": "user", "content": "hello"}], tool_choice="required",
        parallel_tool_calls=False, extra_body={"seed": 1}, **more,
    )  # fmt: skip
    (call,) = [one for one in first.output if isinstance(one, ResponseFunctionToolCall)]
    assert set(json.loads(call.arguments)) == {"a"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    by_id = client.responses.create(
        input=[output],
        previous_response_id=first.id,
        temperature=0,
        **more,  # type: ignore[list-item]
    )
    by_hand = client.responses.create(
        input=[{"role": "user", "content": "hello"}, *(o.model_dump() for o in first.output), output],
        temperature=0, store=False, **more,
    )  # fmt: skip
    assert by_id.previous_response_id == first.id
    assert by_id.usage is not None
    assert by_hand.usage is not None
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens
    assert by_id.output_text == by_hand.output_text


def test_forms_are_honoured(client: OpenAI, tooled: Server) -> None:
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": False,
    }  # fmt: skip
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    answer = client.responses.create(
        model=tooled.model.name, input="hello", text=form, max_output_tokens=200
    )
    assert set(json.loads(answer.output_text)) == {"ok"}
    form["format"]["schema"] = {"type": "x"}
    with pytest.raises(BadRequestError) as wrong:
        client.responses.create(model=tooled.model.name, input="hello", text=form)
    assert wrong.value.param == "text.format"


def test_a_stored_response_is_read_and_forgotten(client: OpenAI, tooled: Server) -> None:
    made = client.responses.create(model=tooled.model.name, input="hello", max_output_tokens=4)
    found = client.responses.retrieve(made.id)
    assert found.output_text == made.output_text
    (item,) = client.responses.input_items.list(made.id).data
    assert item.type == "message"
    client.responses.delete(made.id)
    for again in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(NotFoundError) as missing:
            again(made.id)
        assert missing.value.code == "response_not_found"
    with pytest.raises(NotFoundError) as gone:
        client.responses.create(model=tooled.model.name, input="a", previous_response_id=made.id)
    assert gone.value.param == "previous_response_id"
    kept = client.responses.create(
        model=tooled.model.name, input="hello", max_output_tokens=4, store=False
    )
    with pytest.raises(NotFoundError):
        client.responses.retrieve(kept.id)


def test_a_response_in_the_background_is_waited_for_or_cancelled(
    client: OpenAI, tooled: Server
) -> None:
    more: dict[str, Any] = {"model": tooled.model.name, "input": "hello", "background": True}
    short = client.responses.create(**more, max_output_tokens=4)
    assert short.status in ("queued", "in_progress")
    deadline = time.monotonic() + 20
    while client.responses.retrieve(short.id).status == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.responses.retrieve(short.id).status in ("completed", "incomplete")
    long = client.responses.create(**more, max_output_tokens=4000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(long.id).status == "cancelled"
    tooled.wait_idle(5)
    long = client.responses.create(**more, max_output_tokens=4000, extra_body={"ignore_eos": True})
    client.responses.delete(long.id)
    tooled.wait_idle(5)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(long.id)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "a", "call_id": "b", "arguments": "{"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [FLAT], "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "stream": True}, "background"),
        ({"conversation": "abc"}, "conversation"),
        ({"max_output_tokens": 100_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_offered_is_refused_by_its_field(
    tooled: Server, more: dict[str, Any], param: str
) -> None:
    answer = tooled.post(PATH, {"input": "hello", "max_output_tokens": 4, **more})
    assert answer.status == 400
    assert answer.error["param"] == param


def test_allowed_tools_leave_the_others_out(tooled: Server) -> None:
    other = {**FLAT, "name": "sub"}
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "add"}],
    }
    more = {"tools": [other, FLAT], "tool_choice": choice, "max_output_tokens": 900, "seed": 3}
    calls = ask(tooled, **more)["output"]
    assert {call["name"] for call in calls} == {"add"}


def test_the_store_holds_its_limits_and_not_one_more() -> None:
    def stored(size: int) -> Stored:
        return Stored("", b"x" * size, b"", b"")

    store = ResponseStore(3, 100)
    for name in "abc":
        store.put(name, stored(20))
    store.get("a", "")  # used last
    store.put("d", stored(40))
    assert (len(store), store.num_bytes) == (3, 80)
    assert [name for name in "abcd" if store.holds(name)] == ["a", "c", "d"]
    store.put("d", stored(60))
    assert (len(store), store.num_bytes) == (3, 100), "all bytes"
    store.put("d", stored(61))
    assert (len(store), store.num_bytes) == (2, 81), "one more"
    store.put("e", stored(101))
    assert len(store) == 0, "larger than the store"
    assert not ResponseStore(0, 100).is_on


def test_the_store_is_bounded_and_apart_for_each_key(guarded: Server) -> None:
    body = {"input": "hello", "max_output_tokens": 2}
    ids = [guarded.post(PATH, body).json["id"] for _ in range(3)]
    seen = [guarded.get(f"{PATH}/{id}").status for id in ids]
    assert seen == [404, 200, 200]
    foreign = guarded.send("GET", f"{PATH}/{ids[2]}", headers={"Authorization": "Bearer other"})
    assert foreign.status == 404


def test_a_server_that_stores_nothing_says_so(strict: Server) -> None:
    body = {"input": "hello", "max_output_tokens": 2}
    answer = strict.post(PATH, body).json
    assert answer["store"] is False
    assert strict.get(f"{PATH}/{answer['id']}").status == 404
    refused = strict.post(PATH, {**body, "store": True})
    assert (refused.status, refused.error["param"]) == (400, "store")


def test_the_tokens_of_an_input_are_counted_as_the_response_counts_them(
    tooled: Server, client: OpenAI
) -> None:
    first = ask(tooled)
    for more in (
        {"input": "hello there", "instructions": "Be kind.", "tools": [FLAT]},
        {"input": "and now?", "previous_response_id": first["id"]},
    ):
        counted = client.responses.input_tokens.count(model=tooled.model.name, **more)  # type: ignore[arg-type]
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == ask(tooled, **more)["usage"]["input_tokens"]


def test_reasoning_without_an_answer_may_be_sent_back(tooled: Server) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]}
    told = [{"role": "user", "content": "a"}, thought, {"role": "user", "content": "b"}]
    assert ask(tooled, input=told)["status"] in ("completed", "incomplete")
