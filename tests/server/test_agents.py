"""An agent framework with its defaults: Responses, a tool that runs in the client, and streams."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.server.harness import Server
from tests.server.test_tools import tooled

__all__ = ["tooled"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


async def _run(server: Server, *, streamed: bool, chat: bool) -> tuple[list[int], Any]:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    agents.set_tracing_disabled(True)
    seen: list[int] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int) -> str:
        """Adds."""
        seen.append(a)
        return "7"

    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="adder",
        instructions="Add.",
        model=kind(model=server.model.name, openai_client=client),
        tools=[add],
        # After its first call the framework lets the model choose, so that the run ends.
        model_settings=agents.ModelSettings(
            tool_choice="add", max_tokens=300, extra_body={"seed": 3}
        ),
    )
    async with client:
        if not streamed:
            return seen, (await agents.Runner.run(agent, "hello", max_turns=3)).final_output
        found = agents.Runner.run_streamed(agent, "hello", max_turns=3)
        kinds = [event.type async for event in found.stream_events()]
        assert "raw_response_event" in kinds
        return seen, found.final_output


@pytest.mark.parametrize("chat", [False, True], ids=("responses", "chat"))
@pytest.mark.parametrize("streamed", [False, True], ids=("whole", "streamed"))
def test_openai_agents_calls_its_tool_and_ends(tooled: Server, streamed: bool, chat: bool) -> None:
    import asyncio

    seen, final = asyncio.run(_run(tooled, streamed=streamed, chat=chat))
    assert len(seen) == 1
    assert isinstance(final, str)
