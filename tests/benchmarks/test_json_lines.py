"""Files of prompts: read as they are, and refused with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.json_lines import read_texts

from kvant.errors import BadValue

QUESTION, EITHER = ("question",), ("question", "prompt")


def lines(tmp_path: Path, text: str) -> Path:
    (tmp_path / "prompts.jsonl").write_text(text, encoding="utf-8")
    return tmp_path / "prompts.jsonl"


def test_the_first_lines_are_read_each_by_the_first_name_it_has(tmp_path: Path) -> None:
    path = lines(tmp_path, '{"prompt": "a"}\n{"prompt": "b", "question": "c"}\n{"x": 1}\n')
    assert read_texts(path, EITHER, count=2) == [("a",), ("c",)]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    path = lines(tmp_path, '{"question": "a\u2028b"}\n')
    assert read_texts(path, QUESTION, count=5) == [("a\u2028b",)]


def test_the_shortest_lines_can_be_taken(tmp_path: Path) -> None:
    path = lines(tmp_path, '{"question": "long"}\n{"question": "s"}\n')
    assert read_texts(path, QUESTION, count=1, shortest=True) == [("s",)]


@pytest.mark.parametrize("line", ["no JSON", "[1]", '{"answer": "a"}', '{"question": 5}', ""])
def test_a_line_of_another_kind_is_named(tmp_path: Path, line: str) -> None:
    path = lines(tmp_path, f'{{"question": "a"}}\n{line}\n')
    with pytest.raises(BadValue, match="line 2") as refused:
        read_texts(path, QUESTION, count=2)
    assert "'question'" in refused.value.why


def test_a_file_that_cannot_be_read_is_no_traceback(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path, says in (
        (tmp_path / "none", "No such file"),
        (binary, "UTF-8"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(BadValue, match=says):
            read_texts(path, QUESTION, count=1)
