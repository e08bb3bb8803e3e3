"""What a request can say of its tokens, over HTTP: the same as in Python, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvant.engine.llm import LLM
from kvant.sampling.sampling_params import SamplingParams
from tests.engine import tiny_chat
from tests.server.harness import Server, build_model, events

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, kv_cache_dtype="fp8_per_token_head", kv_cache_memory="4MiB")


def chat(server: Server, **more: Any) -> Any:
    answer = server.post(CHAT, {"messages": HELLO, "temperature": 0, **more})
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.7},
        {"allowed_token_ids": [40, 50, 60]},
        {"temperature": 1.3, "min_p": 0.05, "top_k": 30, "seed": 5, "frequency_penalty": 0.5},
    ],
    ids=str,
)
def test_every_rule_gives_the_tokens_it_gives_in_python(
    server: Server, llm: LLM, params: dict[str, Any]
) -> None:
    (expected,) = llm.generate("abc", SamplingParams(**{"temperature": 0, **params}))
    (plain,) = llm.generate("abc", SamplingParams(temperature=0))
    choice = server.complete("abc", **params).json["choices"][0]
    assert choice["text"] == expected.text
    assert expected.token_ids != plain.token_ids, "the control: the rule changes something"


def test_words_and_ends_that_are_forbidden_do_not_come(server: Server, llm: LLM) -> None:
    (plain,) = llm.generate("abc", SamplingParams(temperature=0))
    words = [c for c in plain.text if c.isascii() and c.isprintable() and c != " "][:4]
    assert words
    found = server.complete("abc", bad_words=words).json["choices"][0]["text"]
    assert not set(words) & set(found)
    place = next(i for i, id in enumerate(plain.token_ids) if id != plain.token_ids[0])
    end = plain.token_ids[place]
    ended = server.complete("abc", stop_token_ids=[end]).json
    assert ended["choices"][0]["stop_reason"] == end
    later = server.complete("abc", stop_token_ids=[end], min_tokens=8).json
    assert ended["usage"]["completion_tokens"] == place + 1
    assert later["usage"]["completion_tokens"] > 8


def test_logit_bias_is_by_the_text_of_an_id(server: Server, llm: LLM) -> None:
    choice = server.complete("abc", logit_bias={"50": 100, "51": -100}, max_tokens=4).json
    expected = llm.encode("abc")
    assert expected
    (same,) = llm.generate(
        "abc", SamplingParams(temperature=0, logit_bias={50: 100, 51: -100}, max_tokens=4)
    )
    assert same.token_ids == (50,) * 4
    assert choice["choices"][0]["text"] == same.text


def _stream(server: Server, path: str, **body: Any) -> list[Any]:
    answer = server.post(path, {"stream": True, "temperature": 0, **body})
    assert answer.status == 200, answer.body
    return events(answer.body)


def test_streams_carry_the_logprobs_of_the_whole_answer(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "logprobs": 2}
    whole = server.complete(**body).json["choices"][0]["logprobs"]
    assert len(whole["tokens"]) == 12
    joined: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in _stream(server, "/v1/completions", **body):
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                joined[name] += values
    assert joined == whole
    asked = {"max_tokens": 9, "logprobs": True, "top_logprobs": 3, "messages": HELLO}
    content = chat(server, **asked)["choices"][0]["logprobs"]["content"]
    parts = [
        one
        for chunk in _stream(server, CHAT, **asked)
        for choice in chunk["choices"]
        for one in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert len(parts) == 9
    assert parts == content


@pytest.mark.parametrize("form", ["text", "ids"])
def test_echo_repeats_the_prompt_with_its_logprobs(server: Server, llm: LLM, form: str) -> None:
    ids = list(llm.encode("abcdef"))
    prompt: Any = "abcdef" if form == "text" else ids
    answer = server.complete(prompt, max_tokens=3, echo=True, logprobs=1).json["choices"][0]
    plain = server.complete(prompt, max_tokens=3, logprobs=1).json["choices"][0]
    assert answer["text"] == "abcdef" + plain["text"]
    found = answer["logprobs"]
    assert len(found["tokens"]) == len(ids) + 3
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert found["text_offset"][:3] == [0, 1, 2]
    after = found["token_logprobs"][len(ids) :]
    assert after == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-4)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    expected = llm.generate(ids, params)[0].prompt_logprobs
    assert expected is not None
    assert found["token_logprobs"][1 : len(ids)] == pytest.approx(
        [one.logprob for one in expected[1:] if one is not None], abs=1e-4
    )
    chunks = _stream(server, "/v1/completions", prompt=prompt, max_tokens=3, echo=True, logprobs=1)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == answer["text"]
    assert [t for c in choices for t in (c["logprobs"] or {"tokens": []})["tokens"]] == found[
        "tokens"
    ]


def test_a_prompt_is_scored_without_a_new_token_as_evaluation_harnesses_do(
    server: Server,
) -> None:
    prompts = ["abc def", "xyz"]
    answer = server.complete(prompts, max_tokens=0, echo=True, logprobs=1).json
    assert [choice["text"] for choice in answer["choices"]] == prompts
    assert [len(c["logprobs"]["tokens"]) for c in answer["choices"]] == [7, 3]
    assert answer["usage"]["completion_tokens"] == 0
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    again = server.complete(prompts, max_tokens=0, echo=True, logprobs=1).json
    for first, second in zip(answer["choices"], again["choices"], strict=True):
        scores = [choice["logprobs"]["token_logprobs"][1:] for choice in (first, second)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4), "a warm cache changes nothing"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    bare = server.complete("abc", max_tokens=0, echo=True).json["choices"][0]
    assert (bare["text"], bare["logprobs"]) == ("abc", None)


def test_prompt_logprobs_have_vllms_shape(server: Server) -> None:
    body = {"max_tokens": 2, "prompt_logprobs": 2, "n": 2}
    answer = server.complete("abcd", **body).json
    for choice in answer["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert len(others) == 3
        for one in others:
            assert 2 <= len(one) <= 3
            assert {value["rank"] for value in one.values()} >= {1, 2}
            assert all(set(v) == {"logprob", "rank", "decoded_token"} for v in one.values())
    plain = server.complete("abcd", max_tokens=1).json
    assert plain["choices"][0]["prompt_logprobs"] is None
    assert plain["system_fingerprint"] is None
    talk = chat(server, max_tokens=1, prompt_logprobs=0)
    assert len(talk["prompt_logprobs"]) == talk["usage"]["prompt_tokens"]


def test_choices_share_the_computed_prompt_and_follow_their_seeds(server: Server) -> None:
    prompt = "a prompt that is longer than three pages of sixteen tokens, asked four times"
    more = {"temperature": 1, "max_tokens": 8, "cache_salt": "choices"}
    before = server.metric("kvant:prefix_cache_hits_total")
    answer = server.complete(prompt, n=4, seed=10, **more).json
    hits = server.metric("kvant:prefix_cache_hits_total") - before
    assert hits >= 3 * 64, "the other three found the pages of the first"
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    for index in range(4):
        alone = server.complete(prompt, seed=10 + index, **more).json["choices"][0]
        assert alone["text"] == answer["choices"][index]["text"]


def test_answers_have_the_form_that_was_asked_for_in_each_of_the_ways(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for more in (
        {"response_format": schema},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ):
        for seed in range(3):
            found = chat(server, temperature=1, seed=seed, max_tokens=150, **more)["choices"][0]
            assert found["finish_reason"] == "stop"
            value = json.loads(found["message"]["content"])
            assert set(value) == {"a", "b"}
            assert value["a"] in range(10)
            assert value["b"] in ("x", "y")
    for more in ({"guided_regex": "[ab]{3}"}, {"structured_outputs": {"regex": "[ab]{3}"}}):
        text = server.complete("abc", **more).json["choices"][0]["text"]
        assert re.fullmatch("[ab]{3}", text)
    for more in (
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ):
        assert server.complete("abc", **more).json["choices"][0]["text"] in ("yes", "no")
    grammar = {"guided_grammar": 'start: "<" /[0-9]/ ">"'}
    assert re.fullmatch("<[0-9]>", server.complete("abc", **grammar).json["choices"][0]["text"])
    for more in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        text = chat(server, max_tokens=5, **more)["choices"][0]["message"]["content"]
        assert text.startswith("{")


def test_a_streamed_form_is_the_whole_one_and_a_bad_one_is_an_error(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 60, "guided_json": SCHEMA}
    whole = server.complete(**body).json["choices"][0]["text"]
    chunks = _stream(server, "/v1/completions", **body)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole
    refused = server.complete("abc", guided_regex="(?=a)b", stream=True)
    assert refused.status == 400  # the stream has not begun
    assert refused.error["param"] == "guided_regex"
    assert refused.error["type"] == "invalid_request_error"


def test_a_form_that_takes_long_to_compile_holds_up_no_stream(server: Server) -> None:
    costly = {"properties": {f"p{i}": {"type": "integer"} for i in range(600)}}
    with server.open_stream(max_tokens=400) as stream:
        stream.readline()
        gaps, last = [], time.monotonic()
        started = time.monotonic()
        answer = server.complete("abc", guided_json=costly, max_tokens=3)
        took = time.monotonic() - started
        for _ in range(60):
            stream.readline()
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
    assert answer.status == 200
    assert took < 6
    assert max(gaps[1:]) < 0.25


def test_a_model_s_own_values_hold_over_http_as_in_python(tmp_path: Path) -> None:
    model = build_model(tmp_path)
    file = model / "generation_config.json"
    file.write_text('{"temperature": 3.0, "repetition_penalty": 1.5}')
    llm = LLM(model, kv_cache_memory="4MiB")
    drawn, greedy = (
        replace(llm.default_params, seed=11, **more) for more in ({}, {"temperature": 0})
    )
    alone = llm.generate("abc", drawn)[0].token_ids
    # Both of the file's ends are ends; the second comes in the answer that is drawn below.
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "eos_token_id": [tiny_chat.END, alone[3]]})
    )
    llm = LLM(model, kv_cache_memory="4MiB")
    with Server(model) as server:
        assert any("temperature 3, repetition_penalty 1.5" in line for line in server.output)
        for body, params in (
            ({}, drawn),
            ({"temperature": None}, drawn),
            ({"temperature": 0}, greedy),
            ({"temperature": 1.0, "repetition_penalty": 1.0}, SamplingParams(seed=11)),
        ):
            answer = server.post("/v1/completions", {"prompt": "abc", "seed": 11, **body}).json
            (same,) = llm.generate("abc", params)
            choice = answer["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (same.text, same.finish_reason)
            if params is drawn:
                assert (len(same.token_ids), same.finish_reason) == (4, "stop")
