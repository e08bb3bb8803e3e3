"""Values that --hf-overrides puts in place of a checkpoint's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvant import LLM, SamplingParams
from kvant.errors import BadCheckpoint, BadValue
from kvant.models.import_cache import RECORD
from kvant.models.local import LocalModel, ModelSource
from kvant.models.overrides import ConfigOverrides, parse_overrides, with_overrides
from tests.models import tiny

YARN: dict[str, Any] = {
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
PROMPT = list(range(3, 43))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def local(path: Path) -> LocalModel:
    return LocalModel(path, path.name, None, ModelSource.DIRECTORY)


def merged(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    overrides = parse_overrides(values, asked_by="t")
    assert overrides is not None
    found: dict[str, Any] = json.loads(
        (with_overrides(local(path), overrides).path / "config.json").read_text()
    )
    return found


def test_answers_are_those_of_a_checkpoint_with_these_values(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path / "plain")
    edited = tmp_path / "edited"
    shutil.copytree(path, edited)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {**config["rope_parameters"], **YARN["rope_parameters"]}
    config["max_position_embeddings"] = 64
    (edited / "config.json").write_text(json.dumps(config))

    def answer(model: Path, **options: Any) -> list[int]:
        llm = LLM(model, dtype="float32", kv_cache_memory="4MiB", **options)
        ids = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        return list(ids[0].token_ids)

    wanted = answer(edited)
    assert answer(path, hf_overrides=YARN) == wanted
    assert answer(path, hf_overrides=json.dumps(YARN)) == wanted
    assert answer(path) != wanted


def test_sections_are_merged_and_the_rest_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    before = {"a": 1, "text_config": {"b": 2, "c": [1, 2]}, "rope_scaling": None}
    (tmp_path / "m" / "config.json").write_text(json.dumps(before))
    found = merged(tmp_path / "m", {"text_config": {"c": [3], "d": {"e": None}}, "f": "x"})
    assert found == {**before, "text_config": {"b": 2, "c": [3], "d": {"e": None}}, "f": "x"}
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == before


@pytest.mark.parametrize("has", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("given", ["rope_parameters", "rope_scaling"])
def test_the_rotary_section_keeps_the_name_that_it_has(
    tmp_path: Path, has: str, given: str
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({has: {"rope_theta": 1e6}}))
    found = merged(tmp_path / "m", {given: {"factor": 2.0}})
    assert found == {has: {"rope_theta": 1e6, "factor": 2.0}}


def test_the_directory_links_to_the_checkpoint_and_is_made_again_if_it_changed(
    tmp_path: Path, cache: Path
) -> None:
    path = tiny.build("llama", tmp_path / "m")
    (path / RECORD).write_text("{}")
    asked = ConfigOverrides('{"max_position_embeddings": 64}')
    first = with_overrides(local(path), asked)
    assert (first.path / "model.safetensors").resolve() == (path / "model.safetensors").resolve()
    assert (path / RECORD).read_text() == "{}", "the checkpoint's own record stays"
    assert with_overrides(local(path), asked) == first
    assert any("max_position_embeddings" in note for note in first.notes)
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    again = with_overrides(local(path), asked)
    assert "0.5" in (again.path / "generation_config.json").read_text()
    (path / "model.safetensors").rename(path / "other.safetensors")
    moved = with_overrides(local(path), asked)
    assert (moved.path / "other.safetensors").exists()
    assert not (moved.path / "model.safetensors").exists()


def test_nothing_else_than_an_object_is_taken(tmp_path: Path) -> None:
    assert parse_overrides("{}", asked_by="--hf-overrides") is None
    for text, why in (("[1]", "an object"), ("{", "not JSON")):
        with pytest.raises(BadValue, match=why):
            parse_overrides(text, asked_by="--hf-overrides")
    path = tiny.build("llama", tmp_path / "m")
    with pytest.raises(BadCheckpoint, match="num_hidden_layers") as refused:
        LLM(path, hf_overrides={"num_hidden_layers": "four"})
    way = "leave --hf-overrides out, which replaces num_hidden_layers"
    assert way in map(str, refused.value.ways_out)
