"""Agent frameworks and wrappers of clients: text, streams, forms and forced calls. Each runs if installed:

    pip install instructor pydantic-ai-slim[openai] langchain-openai litellm smolagents[openai] \\
        autogen-ext[openai] llama-index-llms-openai-like haystack-ai dspy agno semantic-kernel
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
from collections.abc import Callable
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.server.harness import Server
from tests.server.test_tools import tooled

__all__ = ["tooled"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Sum(BaseModel, extra="forbid"):
    """Closed, so that a random model's answer ends."""

    a: Literal[1, 2]
    exact: bool


class Number(BaseModel):
    a: Literal[1, 2]


def add(a: Literal[1, 2]) -> int:
    """Adds.

    Args:
        a: A number.
    """
    return a + 1


ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def _openai(url: str, model: str) -> None:
    client = OpenAI(base_url=url, api_key="x", max_retries=0)
    found = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "hi"}], response_format=Sum
    )
    assert isinstance(found.choices[0].message.parsed, Sum)
    answer = client.responses.parse(model=model, input="hi", text_format=Sum)
    assert isinstance(answer.output_parsed, Sum)


def _instructor(url: str, model: str) -> None:
    instructor: Any = pytest.importorskip("instructor")
    client = OpenAI(base_url=url, api_key="x", max_retries=0)
    for mode in ("TOOLS", "JSON_SCHEMA"):
        found = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
        messages = [{"role": "user", "content": "hi"}]
        made = found.chat.completions.create(model=model, response_model=Sum, messages=messages)
        assert isinstance(made, Sum)
        parts = found.chat.completions.create_partial(
            model=model, response_model=Sum, messages=messages
        )
        assert list(parts)[-1].a in (1, 2)


def _pydantic_ai(url: str, model: str) -> None:
    pydantic_ai: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    providers: Any = pytest.importorskip("pydantic_ai.providers.openai")
    chat = models.OpenAIChatModel(
        model, provider=providers.OpenAIProvider(base_url=url, api_key="x")
    )
    made = pydantic_ai.Agent(chat, output_type=Sum).run_sync("hi").output
    assert isinstance(made, Sum)
    agent = pydantic_ai.Agent(chat, tools=[add], model_settings={"max_tokens": 4})

    async def stream() -> list[str]:
        async with agent.run_stream("hi") as run:
            return [piece async for piece in run.stream_text(delta=True, debounce_by=None)]

    assert len(asyncio.run(stream())) > 1


def _langchain(url: str, model: str) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model=model, base_url=url, api_key="x", max_retries=0)
    assert chat.bind(max_tokens=4).invoke("hi").usage_metadata["output_tokens"] == 4
    assert len(list(chat.bind(max_tokens=4).stream("hi"))) > 1
    calling = chat.bind_tools([add], tool_choice="add")
    assert calling.invoke("hi").tool_calls[0]["args"]["a"] in (1, 2)
    whole = functools.reduce(operator.add, calling.stream("hi"))
    assert [call["name"] for call in whole.tool_calls] == ["add"]
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Sum, method=method).invoke("hi"), Sum)


def _litellm(url: str, model: str) -> None:
    litellm: Any = pytest.importorskip("litellm")
    given: dict[str, Any] = {
        "api_base": url,
        "api_key": "x",
        "messages": [{"role": "user", "content": "hi"}],
    }
    for provider in ("openai", "hosted_vllm"):
        one = litellm.completion(model=f"{provider}/{model}", max_tokens=4, **given)
        assert one.usage.completion_tokens == 4
    parts = litellm.completion(model=f"openai/{model}", max_tokens=4, stream=True, **given)
    assert list(parts)[-1].choices[0].finish_reason == "length"
    chosen = {"type": "function", "function": {"name": "add"}}
    asked = {"tools": [ADD], "tool_choice": chosen, **given}
    parts = list(litellm.completion(model=f"openai/{model}", stream=True, **asked))
    (call,) = litellm.stream_chunk_builder(parts).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    form = litellm.completion(model=f"openai/{model}", response_format=Sum, **given)
    Sum(**json.loads(form.choices[0].message.content))


def _smolagents(url: str, model: str) -> None:
    smolagents: Any = pytest.importorskip("smolagents")
    found = smolagents.OpenAIServerModel(model_id=model, api_base=url, api_key="x", max_tokens=4)
    said = found([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
    assert said.token_usage.output_tokens == 4
    messages = [smolagents.ChatMessage(role="user", content="hi")]
    assert len(list(found.generate_stream(messages))) > 1
    found = smolagents.OpenAIServerModel(model_id=model, api_base=url, api_key="x")
    called = found.generate(messages, tools_to_call_from=[smolagents.tool(add)])
    assert called.tool_calls[0].function.name == "add"


def _autogen(url: str, model: str) -> None:
    autogen: Any = pytest.importorskip("autogen_ext.models.openai")
    agents: Any = pytest.importorskip("autogen_agentchat.agents")
    info = {
        "vision": False, "function_calling": True, "json_output": True, "family": "unknown",
        "structured_output": True,
    }  # fmt: skip
    client = autogen.OpenAIChatCompletionClient(
        model=model, base_url=url, api_key="x", model_info=info, max_tokens=4
    )
    done = asyncio.run(agents.AssistantAgent("a", client, tools=[add]).run(task="hi"))
    assert done.messages[-1].models_usage.completion_tokens == 4


def _llama_index(url: str, model: str) -> None:
    llama_index: Any = pytest.importorskip("llama_index.llms.openai_like")
    found = llama_index.OpenAILike(
        model=model, api_base=url, api_key="x", is_chat_model=True, is_function_calling_model=True,
        max_retries=0,
    )  # fmt: skip
    assert list(found.stream_complete("hi", max_tokens=4))
    assert isinstance(found.as_structured_llm(Sum).complete("hi").raw, Sum)
    tools: Any = pytest.importorskip("llama_index.core.tools")
    called = found.chat_with_tools(
        [tools.FunctionTool.from_defaults(add, fn_schema=Number)], "hi", tool_required=True
    )
    assert found.get_tool_calls_from_response(called)[0].tool_kwargs["a"] in (1, 2)


def _haystack(url: str, model: str) -> None:
    chat: Any = pytest.importorskip("haystack.components.generators.chat")
    dataclasses: Any = pytest.importorskip("haystack.dataclasses")
    utils: Any = pytest.importorskip("haystack.utils")
    found = chat.OpenAIChatGenerator(
        model=model, api_base_url=url, api_key=utils.Secret.from_token("x"), max_retries=0,
        generation_kwargs={"max_tokens": 4},
    )  # fmt: skip
    (reply,) = found.run([dataclasses.ChatMessage.from_user("hi")])["replies"]
    assert reply.meta["usage"]["completion_tokens"] == 4
    tools: Any = pytest.importorskip("haystack.tools")
    parameters = ADD["function"]["parameters"]  # closed, which those of the function are not
    tool = tools.Tool(name="add", description="Adds.", parameters=parameters, function=add)
    pieces: list[Any] = []
    kwargs = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    (reply,) = found.run(
        [dataclasses.ChatMessage.from_user("hi")], generation_kwargs=kwargs,
        tools=[tool], streaming_callback=pieces.append,
    )["replies"]  # fmt: skip
    assert {call.tool_name for call in reply.tool_calls} == {"add"}
    assert len(pieces) > 1


def _dspy(url: str, model: str) -> None:
    dspy: Any = pytest.importorskip("dspy")
    found = dspy.LM(f"openai/{model}", api_base=url, api_key="x", max_tokens=4, cache=False)
    assert len(found("hi")) == 1


def _agno(url: str, model: str) -> None:
    agent: Any = pytest.importorskip("agno.agent")
    like: Any = pytest.importorskip("agno.models.openai.like")
    found = like.OpenAILike(id=model, base_url=url, api_key="x", max_tokens=4)
    assert agent.Agent(model=found, tools=[add], telemetry=False).run("hi").content


def _semantic_kernel(url: str, model: str) -> None:
    connector: Any = pytest.importorskip("semantic_kernel.connectors.ai.open_ai")
    contents: Any = pytest.importorskip("semantic_kernel.contents")
    history = contents.ChatHistory()
    history.add_user_message("hi")
    settings = connector.OpenAIChatPromptExecutionSettings(max_tokens=4)

    async def ask() -> Any:
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            service = connector.OpenAIChatCompletion(ai_model_id=model, async_client=client)
            return await service.get_chat_message_content(history, settings)

    assert asyncio.run(ask())


TRIED = (
    _openai, _instructor, _pydantic_ai, _langchain, _litellm, _smolagents, _autogen, _llama_index,
    _haystack, _dspy, _agno, _semantic_kernel,
)  # fmt: skip


@pytest.mark.parametrize("tried", TRIED, ids=lambda tried: tried.__name__[1:])
def test_a_framework_works_as_its_users_write_it(
    tooled: Server, tried: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    tried(f"http://127.0.0.1:{tooled.port}/v1", tooled.model.name)
