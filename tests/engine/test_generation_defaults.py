"""What a model's generation_config.json decides for requests without these parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvant import LLM
from kvant.sampling.generation_defaults import recommendation, recommended_params
from kvant.sampling.sampling_params import SamplingParams
from tests.engine import tiny_chat


@pytest.mark.parametrize(
    ("file", "taken"),
    [
        ({}, {}),
        ({"eos_token_id": [2, 5], "max_length": 50, "top_k": None}, {}),
        ({"do_sample": True}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        (
            {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.05},
            {"temperature": 0.7, "min_p": 0.1, "repetition_penalty": 1.05},
        ),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.8},
            {"temperature": 0, "top_p": 0.8},
        ),
        ({"temperature": 0}, {"temperature": 0}),
    ],
    ids=str,
)
def test_the_files_values_hold_and_do_sample_false_is_greedy(
    tmp_path: Path, file: dict[str, object], taken: dict[str, float]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert recommended_params(tmp_path) == replace(SamplingParams(), **taken)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "taken", "words"),
    [
        ('{"temperature": -3, "top_p": 0, "min_p": 0.1}', {"min_p": 0.1}, ["temperature", "top_p"]),
        ('{"top_k": 5.5, "temperature": "1"}', {}, ["top_k", "temperature"]),
        (
            '{"top_k": 1' + 400 * "0" + ', "temperature": 1' + 400 * "0" + "}",
            {},
            ["top_k", "temperature"],
        ),
        ('{"top_k": 9223372036854775808, "min_p": 0.1}', {"min_p": 0.1}, ["top_k"]),
        ('{"top_k": true, "repetition_penalty": NaN}', {}, ["top_k", "repetition_penalty"]),
        ("[1]", {}, ["not a JSON object"]),
        ('{"temperature"', {}, ["cannot be read"]),
        ("\x00\x80", {}, ["cannot be read"]),
        ("[" * 100_000, {}, ["cannot be read"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_is_left_out_aloud_and_the_rest_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, taken: dict[str, float],
    words: list[str],
) -> None:  # fmt: skip
    (tmp_path / "generation_config.json").write_text(text, encoding="latin-1")
    assert recommended_params(tmp_path) == replace(SamplingParams(), **taken)  # type: ignore[arg-type]
    told = sorted(caplog.messages)
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(sorted(words), told, strict=True))


def test_a_model_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert recommended_params(tmp_path) == SamplingParams()
    assert recommendation(recommended_params(tmp_path)) == ""


def test_a_recommendation_names_only_the_values_that_differ() -> None:
    params = SamplingParams(temperature=0.6, top_k=20, max_tokens=5)
    assert recommendation(params) == "temperature 0.6, top_k 20"


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [70, 71]}, 5, {70, 71}),
        ({"temperature": 0.5}, 5, {5}),
        (None, 5, {5}),
        ({}, None, {tiny_chat.END}),
        (None, None, {tiny_chat.END}),
    ],
    ids=str,
)
def test_an_answer_ends_where_any_of_the_models_files_says_so(
    tmp_path: Path, generation: dict[str, object] | None, config: int | None, ends: set[int]
) -> None:
    """generation_config.json, else config.json, else the tokenizer."""
    path = tiny_chat.build(tmp_path)
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, "eos_token_id": config}))
    (path / "generation_config.json").unlink()
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    llm = LLM(path, dtype="float32", device="cpu", kv_cache_memory="4MiB", max_num_seqs=2)
    assert llm.engine.eos_token_ids == ends
