"""The engine and the API process see the same tokenizer, or the same fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant.engine import tokenizing
from kvant.errors import BadCheckpoint, RequestError
from kvant.server import tokenizer
from tests.engine import tiny_chat

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


@pytest.mark.parametrize("name", FILES)
def test_any_tokenizer_file_counts_in_both_processes(tmp_path: Path, name: str) -> None:
    assert tokenizing.open_tokenizer(tmp_path) is tokenizer.open_tokenizer(tmp_path) is None
    (tmp_path / name).write_text("nothing of the kind")
    for read in (tokenizing.open_tokenizer, tokenizer.open_tokenizer):
        with pytest.raises(BadCheckpoint):
            read(tmp_path)


def test_lone_surrogates_are_a_fault_of_the_request_in_prompts_and_in_chats(tmp_path: Path) -> None:
    found = tokenizer.open_tokenizer(tiny_chat.build(tmp_path))
    assert found is not None
    with pytest.raises(RequestError, match="no valid Unicode") as refused:
        found.encode("\ud800")
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match="no valid Unicode") as refused:
        found.encode_chat([{"role": "user", "content": "\ud800"}])
    assert refused.value.param == "messages"
