"""--chat-template and --default-chat-template-kwargs: how conversations are written, for a whole server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvant.errors import BadValue
from kvant.server.config import ServerConfig
from kvant.server.parameters import read_template_values
from tests.server.harness import Server

TEMPLATE = "{% for one in messages %}{{ one['content'] }} {{ tail }}{% endfor %}"


def prompt_of(server: Server, **more: Any) -> str:
    answer = server.post("/tokenize", {"messages": [{"role": "user", "content": "abc"}], **more})
    assert answer.status == 200, answer.body
    tokens = answer.json["tokens"]
    return str(server.post("/detokenize", {"tokens": tokens}).json["prompt"])


def test_a_server_takes_a_template_and_its_values(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    flags = ("--chat-template", str(file), "--default-chat-template-kwargs", '{"tail": "bb"}')
    with Server(model, flags) as server:
        assert server.get("/tokenizer_info").json["chat_template"] == TEMPLATE
        assert prompt_of(server).split() == ["abc", "bb"]
        asked = prompt_of(server, chat_template_kwargs={"tail": "cc"})
        assert asked.split() == ["abc", "cc"]  # a request's own value wins


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match=r"--chat-template .*/none cannot be read"):
        _ = ServerConfig(chat_template=str(tmp_path / "none")).own_template
    assert ServerConfig().own_template is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "column"),
        ("[1]", "expected an object"),
        ('{"messages": 1}', "the server sets messages"),
    ],
)
def test_values_for_a_template_are_an_object_of_free_names(given: str, why: str) -> None:
    with pytest.raises(BadValue) as refused:
        read_template_values(given)
    assert why in str(refused.value)
    (way,) = refused.value.ways_out
    assert read_template_values(way.arguments[1]) == json.loads(way.arguments[1])
