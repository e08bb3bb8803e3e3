"""The official client, unchanged, against the server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.server.harness import MODEL_LEN, Server

openai = pytest.importorskip("openai")


@pytest.fixture
def client(server: Server) -> Iterator[object]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


HELLO = [{"role": "user", "content": "hello"}]


def test_chats_whole_and_streamed_are_the_same(client: object, server: Server) -> None:
    more = {"model": server.model.name, "messages": HELLO, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**more)  # type: ignore[attr-defined]
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    text, usage = "", None
    options = {"include_usage": True}
    stream = client.chat.completions.create(  # type: ignore[attr-defined]
        **more, stream=True, stream_options=options
    )
    for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == 16


def test_completions_and_models(client: object, server: Server) -> None:
    (model,) = client.models.list().data  # type: ignore[attr-defined]
    answer = client.completions.create(  # type: ignore[attr-defined]
        model=model.id, prompt=["a", "b"], max_tokens=3, temperature=0, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert len(answer.choices[0].logprobs.token_logprobs) == 3


def test_choices_and_logprobs_whole_and_streamed(client: object, server: Server) -> None:
    create = client.chat.completions.create  # type: ignore[attr-defined]
    more = {"model": server.model.name, "messages": HELLO, "max_tokens": 6, "seed": 3, "n": 3}
    asked = {"temperature": 1.0, "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5}
    whole = create(**more, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    tokens = [[one.token for one in choice.logprobs.content] for choice in whole.choices]
    assert {len(each) for each in tokens} == {6}
    assert all(len(one.top_logprobs) == 2 for c in whole.choices for one in c.logprobs.content)
    streamed: list[list[str]] = [[], [], []]
    for chunk in create(**more, **asked, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed[choice.index] += [one.token for one in choice.logprobs.content]
    assert streamed == tokens
    biased = client.completions.create(  # type: ignore[attr-defined]
        model=server.model.name, prompt="a", max_tokens=3, echo=True, logprobs=1, n=2,
        logit_bias={"50": 100}, frequency_penalty=0.1, seed=1,
    )  # fmt: skip
    assert biased.choices[0].text == biased.choices[1].text
    assert biased.choices[0].logprobs.token_logprobs[0] is None
    assert len(biased.choices[0].logprobs.tokens) == 4


def test_response_formats_are_honoured(client: object, server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    create = client.chat.completions.create  # type: ignore[attr-defined]
    more = {"model": server.model.name, "messages": HELLO, "max_tokens": 200, "seed": 1}
    found = json.loads(create(**more, response_format=form).choices[0].message.content)
    assert set(found) == {"ok", "n"}
    assert type(found["ok"]) is bool
    assert found["n"] <= 99
    with pytest.raises(openai.BadRequestError) as wrong:
        create(
            **more, response_format={**form, "json_schema": {"name": "x", "schema": {"type": "x"}}}
        )
    assert wrong.value.param == "response_format"


def test_errors_are_the_clients_own_classes(client: object, server: Server) -> None:
    create = client.chat.completions.create  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        create(model=server.model.name, messages=HELLO, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        create(model=server.model.name, messages=HELLO, max_tokens=MODEL_LEN)
    assert long.value.code == "context_length_exceeded"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError) as tools:
        create(model=server.model.name, messages=HELLO, tools=[tool])
    assert tools.value.param == "tools"


def test_a_key_is_asked_for_in_the_clients_way(guarded: Server) -> None:
    url = f"http://127.0.0.1:{guarded.port}/v1"
    with openai.OpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
        assert client.models.list().data
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_the_clients_own_retries_get_through_a_full_server(guarded: Server) -> None:
    guarded.wait_idle(5)
    url = f"http://127.0.0.1:{guarded.port}/v1"
    with ExitStack() as running, openai.OpenAI(base_url=url, api_key="sesame") as client:
        for _ in range(3):  # two run, one waits; all end after --request-timeout
            running.enter_context(guarded.open_stream(max_tokens=4000))
        create = client.completions.with_raw_response.create
        with pytest.raises(openai.RateLimitError):
            client.with_options(max_retries=0).completions.create(
                model=guarded.model.name, prompt="abc"
            )
        threading.Timer(0.5, running.close).start()
        answer = create(model=guarded.model.name, prompt="abc", max_tokens=2)
        assert answer.retries_taken >= 1
        assert answer.parse().usage.completion_tokens == 2
