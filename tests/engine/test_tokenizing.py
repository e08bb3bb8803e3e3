"""The engine and the API process see the same tokenizer, or the same fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvant.engine import text
from kvant.engine.text import Tokenizing
from kvant.errors import BadCheckpoint, RequestError
from kvant.server import template
from tests.engine import tiny_chat

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


@pytest.mark.parametrize("name", FILES)
def test_any_tokenizer_file_counts_in_both_processes(tmp_path: Path, name: str) -> None:
    assert text.open_tokenizer(tmp_path) is template.open_tokenizer(tmp_path) is None
    (tmp_path / name).write_text("nothing of the kind")
    for read in (text.open_tokenizer, template.open_tokenizer):
        with pytest.raises(BadCheckpoint):
            read(tmp_path)


def test_lone_surrogates_are_a_fault_of_the_request_in_prompts_and_in_chats(tmp_path: Path) -> None:
    found = template.open_tokenizer(tiny_chat.build(tmp_path))
    assert found is not None
    with pytest.raises(RequestError, match="not valid Unicode") as refused:
        found.encode("\ud800")
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match="not valid Unicode") as refused:
        found.encode_chat([{"role": "user", "content": "\ud800"}])
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer.json", {"model": {"type": "of another version"}}),
        ("tokenizer.json", {"added_tokens": "many"}),
        ("tokenizer_config.json", {"eos_token": 5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("read", [text.open_tokenizer, template.open_tokenizer])
def test_any_error_of_a_tokenizer_is_reported_as_a_bad_file(
    tmp_path: Path,
    file: str,
    changes: dict[str, object],
    read: Callable[[Path], Tokenizing | None],
) -> None:
    path = tiny_chat.build(tmp_path)
    said = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**said, **changes}))
    with pytest.raises(BadCheckpoint, match="no tokenizer that can be read"):
        read(path)


@pytest.mark.parametrize("read", [text.open_tokenizer, template.open_tokenizer])
def test_a_config_that_transformers_refuses_is_no_fault_of_the_tokenizer(
    tmp_path: Path, read: Callable[[Path], Tokenizing | None]
) -> None:
    path = tiny_chat.build(tmp_path)
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, "use_cache": "often"}))
    with pytest.raises(BadCheckpoint, match=r"config\.json(.|\n)*'use_cache'"):
        read(path)


CUT = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
FILLED = {
    "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "<pad>",
}  # fmt: skip


@pytest.mark.parametrize("kept", [{"truncation": CUT}, {"padding": FILLED}], ids=str)
@pytest.mark.parametrize("read", [text.open_tokenizer, template.open_tokenizer])
def test_no_prompt_is_cut_or_filled_up_as_it_was_in_training(
    tmp_path: Path, kept: dict[str, object], read: Callable[[Path], Tokenizing | None]
) -> None:
    """Files say so wherever a tokenizer was saved after its last batch; transformers passes over it."""
    path = tiny_chat.build(tmp_path)
    file = path / "tokenizer.json"
    said = "a text of more than five tokens"
    plain = read(path)
    assert plain is not None
    ids = plain.encode(said)
    assert 5 < len(ids) < 64
    file.write_text(json.dumps({**json.loads(file.read_text()), **kept}))
    found = read(path)
    assert found is not None
    assert found.encode(said) == ids == found.tokenizer(said)["input_ids"]
    assert found.encode_rendered(said) == plain.encode_rendered(said)
