"""/infill: prompts in the model's own marks, llama.cpp's answers, and where an answer ends."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.sampling.sampling_params import SamplingParams
from kvant.server.api_error import ApiError
from kvant.server.config import Limits
from kvant.server.fill import IndentedText, fill_form
from kvant.server.infill import read_infill
from kvant.server.requests import Facts
from tests.engine.tiny_chat import FILL
from tests.server.harness import Server

LIMITS = Limits()
FORM = fill_form(FILL.__contains__)
FACTS = Facts(("m",), 100, 50, True, SamplingParams(), infill=FORM)
GAP = {"input_prefix": "int a = ", "input_suffix": ";\n", "temperature": 0}
FILES = [{"filename": "a.h", "text": "int f();\n"}, {"filename": "b.h", "text": "int g();"}]
EDITOR = {
    "id_slot": 0, "input_extra": FILES, "prompt": "f", "n_predict": 8, "n_indent": 0, "top_k": 40,
    "top_p": 0.9, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 60_000, "ignore_eos": True,
}  # fmt: skip


def _prompt(more: dict[str, Any], facts: Facts = FACTS) -> Any:
    generation, _ = read_infill(json.dumps({**GAP, **more}).encode(), LIMITS, facts)
    return generation.prompts[0]


def test_the_prompt_has_the_models_own_marks() -> None:
    gap = "<|fim_prefix|>int a = <|fim_suffix|>;\n<|fim_middle|>"
    assert _prompt({}) == gap
    assert _prompt({"prompt": "f"}) == gap + "f"
    files = "<|file_sep|>a.h\nint f();\n<|file_sep|>b.h\nint g();\n<|file_sep|>file\n"
    assert _prompt({"input_extra": FILES}) == "<|repo_name|>project\n" + files + gap
    plain = replace(FACTS, infill=fill_form(FILL[:3].__contains__))
    assert _prompt({"input_extra": FILES}, plain) == "a.h\nint f();\nb.h\nint g();\n" + gap


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input_extra": [{}]}, "input_extra"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra"),
        ({"input_extra": [{"filename": 1, "text": "a"}]}, "input_extra"),
        ({"input_extra": {}}, "input_extra"),
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 1}, "input_suffix"),
        ({"samplers": ["mirostat"]}, "samplers"),
        ({"n": 2}, "n"),
        ({"suffix": "a"}, "suffix"),
        ({"n_indent": -1}, "n_indent"),
        ({"grammar": 1}, "grammar"),
        ({"response_fields": ["a"] * 65}, "response_fields"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_wrong_requests_name_the_field(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        _prompt(more)
    assert (refused.value.status, re.split(r"[.[]", str(refused.value.param))[0]) == (400, param)


def test_a_model_without_marks_is_refused_with_a_way_out() -> None:
    with pytest.raises(ApiError, match="/v1/completions") as refused:
        _prompt({}, replace(FACTS, infill=None))
    assert refused.value.param == "input_prefix"


@given(
    st.text(st.sampled_from("ab \t\n"), max_size=40),
    st.integers(0, 4),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_indented_text_is_the_same_however_it_is_cut(
    text: str, least: int, cuts: list[int]
) -> None:
    first, *others = text.split("\n")
    kept = [first]
    for line in others:
        body = line.lstrip(" \t")
        if body and len(line) - len(body) < least:
            break
        kept.append(line)
    reader = IndentedText(least)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    shown = "".join(reader.feed(text[a:b]) for a, b in itertools.pairwise(places))
    assert shown + reader.finish() == "\n".join(kept) == reader.text
    assert reader.is_over == (len(kept) <= len(others))


def test_an_editors_request_is_answered_as_llama_cpp_answers(server: Server) -> None:
    whole = server.post("/infill", {**GAP, **EDITOR, "return_tokens": True})
    assert whole.status == 200
    answer = whole.json
    assert answer["stop"] is True
    assert answer["stop_type"] == "limit"
    assert answer["tokens_predicted"] == len(answer["tokens"]) == 8
    assert answer["tokens_evaluated"] == answer["timings"]["prompt_n"] + answer["tokens_cached"]
    assert answer["timings"]["predicted_n"] == 8
    other = {"prompt": FORM.prompt(  # type: ignore[union-attr]
        GAP["input_prefix"], GAP["input_suffix"], [(one["filename"], one["text"]) for one in FILES]
    ) + "f"}  # fmt: skip
    same = server.complete(**other, max_tokens=8, ignore_eos=True, top_k=40, top_p=0.9)
    assert answer["content"] == same.json["choices"][0]["text"]
    asked = ["content", "timings/predicted_n", "stop_type", "no/such"]
    some = server.post("/infill", {**GAP, **EDITOR, "response_fields": asked})
    assert some.json == {
        "content": answer["content"], "timings/predicted_n": 8, "stop_type": "limit"
    }  # fmt: skip
    streamed = server.post("/infill", {**GAP, **EDITOR, "stream": True})
    parts = [json.loads(line[6:]) for line in streamed.body.decode().split("\n\n") if line]
    assert "".join(part["content"] for part in parts) == answer["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]


def test_no_tokens_fill_the_cache(server: Server) -> None:
    warm = {**GAP, **EDITOR, "n_predict": 0, "samplers": [], "input_prefix": "x" * 200}
    answer = server.post("/infill", {**warm, "response_fields": [""]})
    assert (answer.status, answer.json) == (200, {})
    assert server.post("/infill", {**warm, "n_predict": 1}).json["tokens_cached"] >= 200


def test_time_is_limited_from_the_first_whole_line(server: Server) -> None:
    newline = str(server.post("/tokenize", {"prompt": "\n"}).json["tokens"][0])
    lines = {**GAP, **EDITOR, "n_predict": 3000, "logit_bias": {newline: 100}}
    late = server.post("/infill", {**lines, "t_max_predict_ms": 1}).json
    assert 1 < late["tokens_predicted"] < 3000
    assert late["stop_type"] == "limit"
    assert "tokens_cached" not in late, "not known of an answer that was cut"
    server.wait_idle(5)
