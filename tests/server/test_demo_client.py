"""The demo's two clients: whichever package is there, they see the same answer and the shared prefix."""

from __future__ import annotations

import pytest

from kvant.cli import demo_server
from kvant.cli.demo_server import ask
from tests.server.harness import Server


@pytest.mark.parametrize("client", ["openai-python", "Python's http.client"])
def test_the_second_client_finds_what_the_first_one_left(
    server: Server, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client == "openai-python":
        pytest.importorskip("openai")
    monkeypatch.setattr(demo_server, "client_name", lambda: client)

    def asked(question: str) -> demo_server.Answered:
        text = {"role": "system", "content": f"{client}: a text that both of them have. " * 3}
        talk = [text, {"role": "user", "content": question}]
        return ask(server.port, server.model.name, talk, max_tokens=6)

    first, second = asked("one?"), asked("another?")
    assert first.cached_tokens == 0
    assert 64 <= second.cached_tokens < second.prompt_tokens
    assert first.text
    assert asked("one?").text == first.text
    assert 0 < first.first < 30
