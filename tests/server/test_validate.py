"""Reading a body returns a request within the limits, or raises ApiError, for any bytes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvant.sampling.sampling_params import SamplingParams
from kvant.server.api_error import ApiError
from kvant.server.config import Limits
from kvant.server.fill import fill_form
from kvant.server.parameters import CHAT, COMPLETIONS
from kvant.server.requests import Facts, read_chat, read_completion
from kvant.server.wire import ChatBody, CompletionBody

LIMITS = Limits()
FACTS = Facts(("m",), 100, 50, True, SamplingParams(temperature=0.5, top_p=0.9))
WIDE = Facts(("m",), 100, 2000, True, SamplingParams())


def test_a_suffix_is_put_behind_the_models_own_marks() -> None:
    marks = {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "[SUFFIX]", "[PREFIX]"}
    form = fill_form(lambda mark: mark in marks)
    body = json.dumps({"prompt": "a {suffix} b", "suffix": "c {prefix}", "max_tokens": 2}).encode()
    found = read_completion(body, LIMITS, replace(FACTS, infill=form))
    assert found.prompts == ("<|fim_prefix|>a {suffix} b<|fim_suffix|>c {prefix}<|fim_middle|>",)
    other = fill_form(lambda mark: mark in ("[SUFFIX]", "[PREFIX]"))
    found = read_completion(body, LIMITS, replace(FACTS, infill=other))
    assert found.prompts == ("[SUFFIX]c {prefix}[PREFIX]a {suffix} b",)
    assert fill_form(lambda mark: mark == "<fim_prefix>") is None
    for more, facts in (({}, FACTS), ({"prompt": [1]}, replace(FACTS, infill=form))):
        with pytest.raises(ApiError) as refused:
            read_completion(
                json.dumps({"prompt": "a", "suffix": "b", **more}).encode(), LIMITS, facts
            )
        assert refused.value.param == "suffix"


def _biases(count: int) -> dict[str, int]:
    return {str(token): 1 for token in range(count)}


def _metadata(count: int, key: int = 64, value: int = 512) -> dict[str, str]:
    return {str(i).rjust(key, "k"): "v" * value for i in range(count)}


NAMES = sorted(
    {
        *ChatBody.__struct_fields__,
        *CompletionBody.__struct_fields__,
        *CHAT.refused,
        *COMPLETIONS.refused,
    }
)

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 200)
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(NAMES), _VALUES, max_size=6))
@settings(max_examples=400, deadline=None)
def test_every_json_body_gives_a_request_or_an_api_error(body: dict[str, Any]) -> None:
    data = json.dumps({"prompt": "a", "messages": [{"role": "user", "content": "a"}], **body})
    for read in (read_chat, read_completion):
        try:
            found = read(data.encode(), LIMITS, FACTS)
        except ApiError as refused:
            statuses = {refused.status}
            json.dumps(refused.body).encode()
            assert statuses <= {400, 404}
            continue
        assert 1 <= found.num_sequences <= LIMITS.sequences
        assert found.sampling.n == found.n


@given(st.binary(max_size=300))
@example(b"\xff")
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_json_body_give_an_api_error(data: bytes) -> None:
    for read in (read_chat, read_completion):
        with pytest.raises(ApiError):
            read(data, LIMITS, FACTS)


@pytest.mark.parametrize(
    ("most", "at", "beyond"),
    [
        ("n", {"n": 128}, {"n": 129}),
        ("prompts", {"prompt": ["a"] * 256}, {"prompt": ["a"] * 257}),
        ("sequences", {"prompt": ["a"] * 4, "n": 128}, {"prompt": ["a"] * 5, "n": 128}),
        ("logprobs", {"logprobs": 20}, {"logprobs": 21}),
        ("stops", {"stop": ["a"] * 16}, {"stop": ["a"] * 17}),
        ("stop chars", {"stop": "a" * 256}, {"stop": "a" * 257}),
        ("salt", {"cache_salt": "a" * 256}, {"cache_salt": "a" * 257}),
        ("seed", {"seed": 2**63 - 1}, {"seed": 2**63}),
        ("token ids", {"stop_token_ids": [49]}, {"stop_token_ids": [50]}),
        ("prompt ids", {"prompt": [49]}, {"prompt": [50]}),
        ("temperature", {"temperature": 2}, {"temperature": 2.0001}),
        ("bad words", {"bad_words": ["a"] * 256}, {"bad_words": ["a"] * 257}),
        ("bad word", {"bad_words": ["a" * 256]}, {"bad_words": ["a" * 257]}),
        ("metadata", {"metadata": _metadata(16)}, {"metadata": _metadata(17)}),
        ("metadata key", {"metadata": _metadata(1)}, {"metadata": _metadata(1, key=65)}),
        ("metadata value", {"metadata": _metadata(1)}, {"metadata": _metadata(1, value=513)}),
        ("choices", {"guided_choice": ["a"] * 2000}, {"guided_choice": ["a"] * 2001}),
        ("prompt logprobs", {"prompt_logprobs": 20}, {"prompt_logprobs": 21}),
    ],
)
def test_every_limit_holds_at_its_value_and_not_one_beyond(
    most: str, at: dict[str, Any], beyond: dict[str, Any]
) -> None:
    read_completion(json.dumps({"prompt": "a", **at}).encode(), LIMITS, FACTS)
    with pytest.raises(ApiError) as fault:
        read_completion(json.dumps({"prompt": "a", **beyond}).encode(), LIMITS, FACTS)
    assert fault.value.status == 400


def test_logit_bias_has_at_most_1024_entries() -> None:
    for count in (1024, 1025):
        body = json.dumps({"prompt": "a", "logit_bias": _biases(count)}).encode()
        if count == 1024:
            assert len(read_completion(body, LIMITS, WIDE).sampling.logit_bias) == count
        else:
            with pytest.raises(ApiError, match="the limit is 1024"):
                read_completion(body, LIMITS, WIDE)


def test_a_server_may_be_told_to_take_smaller_forms() -> None:
    tight = Limits(schema_depth=2, enum_values=3)
    for schema, fits in (({"a": {"b": 1}}, True), ({"a": {"b": {"c": 1}}}, False)):
        for form in (
            {"guided_json": schema},
            {"structured_outputs": {"json": schema}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        ):
            body = json.dumps({"prompt": "a", **form}).encode()
            read_completion(body, LIMITS, FACTS)
            if fits:
                read_completion(body, tight, FACTS)
            else:
                with pytest.raises(ApiError, match="2 levels") as fault:
                    read_completion(body, tight, FACTS)
                assert fault.value.param == next(iter(form))


def test_the_models_defaults_apply_where_a_request_does_not_say() -> None:
    silent = read_completion(b'{"prompt":"a"}', LIMITS, FACTS)
    assert silent.sampling == FACTS.defaults
    spoken = read_completion(b'{"prompt":"a","temperature":0}', LIMITS, FACTS)
    assert spoken.sampling == SamplingParams(temperature=0, top_p=0.9)
    null = read_chat(
        b'{"messages":[{"role":"user","content":"a"}],"temperature":null,"top_p":1}', LIMITS, FACTS
    )
    assert null.sampling == SamplingParams(temperature=0.5, max_tokens=None)


def test_large_wrong_bodies_are_refused_quickly() -> None:
    wrong = b'{"prompt":[' + b'"a",' * 1_000_000 + b"1]}"
    started = time.perf_counter()
    with pytest.raises(ApiError):
        read_completion(wrong, LIMITS, FACTS)
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            '{"messages": [{"role": "robot", "content": "a"}]}',
            "messages[0].role: expected one of 'assistant', 'developer', 'system', 'tool', 'user'",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "xml"}}',
            "response_format.type: expected one of 'json_object', 'json_schema', 'text'",
        ),
        (
            '{"messages": [], "response_format": {"type": "json_object", "shape": {}}}',
            "response_format.shape: this endpoint has no such parameter",
        ),
        (
            '{"messages": [], "stream": true, "stream_options": {"with_usage": true}}',
            "stream_options.with_usage: this endpoint has no such parameter",
        ),
        ('{"messages": [],}', "the body is not valid JSON: trailing comma in object (byte 16)"),
        ('{"messages": [', "the body is not valid JSON: input data was truncated"),
    ],
)
def test_a_refusal_says_what_would_be_right(body: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_chat(body.encode(), LIMITS, FACTS)
    assert refused.value.message == message


def test_an_answer_that_was_cut_within_its_reasoning_may_come_back() -> None:
    turn = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    body = {"messages": [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}]}
    found = read_chat(json.dumps(body).encode(), LIMITS, WIDE).conversation
    assert found is not None
    assert found.messages[1] == {**turn, "content": ""}
    empty = {"messages": [{"role": "user", "content": None}]}
    with pytest.raises(ApiError):
        read_chat(json.dumps(empty).encode(), LIMITS, WIDE)
