"""Keys and origins that no client could use are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvant.errors import BadValue
from kvant.server.access import check_keys, check_names, check_origins, read_keys


def test_a_file_of_keys_has_one_a_line_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# first\none\n\n  two#2  \n")
    assert read_keys(file) == ("one", "two#2")


@pytest.mark.parametrize("content", ["", "\n\n", "# nothing\n", None])
def test_a_key_file_without_keys_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BadValue, match="--api-key-file"):
        read_keys(file)


@pytest.mark.parametrize("key", ["", "a b", "a\n", "clé", "\x7f"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(BadValue) as refused:
        check_keys(("good", key))
    assert len(key) < 2 or key not in str(refused.value)
    check_keys(("good", "x-Y_1!~"))


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "ftp://x", "", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(BadValue, match="origin"):
        check_origins((origin,))
    check_origins(("*", "https://app.example", "http://app.example:8080"))


@pytest.mark.parametrize("names", [("",), ("good", "  ")])
def test_a_model_without_a_name_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(BadValue, match="--served-model-name is empty"):
        check_names(names)
    check_names(("good", "two words"))
