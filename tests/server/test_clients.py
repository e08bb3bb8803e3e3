"""What real clients send: served, or refused by name. Nothing that would change an answer is ignored."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from kvant.engine.llm import LLM
from kvant.sampling.sampling_params import SamplingParams
from tests.server.harness import MODEL_LEN, Server, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
GBNF = 'root ::= item ("," item)*\nitem ::= [0-9] [a-c]\n'


@pytest.fixture(scope="module")
def llm(model: Any) -> LLM:
    return LLM(model, kv_cache_dtype="fp8_per_token_head", kv_cache_memory="4MiB")


def chat(server: Server, **more: Any) -> Any:
    answer = server.post(CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 6, **more})
    assert answer.status == 200, answer.body
    return answer.json


def stream(server: Server, path: str, **more: Any) -> list[Any]:
    body = {"temperature": 0, "max_tokens": 6, "stream": True, **more}
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    return events(answer.body)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"json_schema": {"type": "integer", "minimum": 0, "maximum": 99}}, "[0-9]{1,2}"),
        ({"json_schema": '{"enum": [7]}'}, "7"),
        ({"grammar": 'root ::= "ab" [0-9]'}, "ab[0-9]"),
        ({"response_format": {"type": "json_object", "schema": {"const": 42}}}, "42"),
        ({"ebnf": 'root ::= ("x" | "y") "z"'}, "[xy]z"),
        ({"guided_grammar": 'root ::= "q" "r"?'}, "qr?"),
        ({"structured_outputs": {"grammar": 'start: "lark"'}}, "lark"),
    ],
    ids=str,
)
def test_forms_of_llama_cpp_and_sglang_hold(
    server: Server, form: dict[str, Any], pattern: str
) -> None:
    for seed in range(3):
        answer = server.complete("abc", temperature=1.5, seed=seed, max_tokens=20, **form)
        assert answer.status == 200, answer.body
        assert re.fullmatch(pattern, answer.json["choices"][0]["text"].strip())


def test_a_gbnf_grammar_that_makes_no_sense_is_refused_by_its_field(server: Server) -> None:
    for grammar in ('item ::= "a"', "root ::= (", 'root ::= unknown "a"', "(" * 20_000):
        answer = server.complete("abc", grammar=grammar)
        assert answer.status == 400
        assert answer.error["param"] == "grammar"


VALUES: dict[str, Any] = {
    "samplers": ["top_k"], "logprob_token_ids": [5], "thinking_token_budget": 5,
    "repetition_detection": {"min_count": 2}, "vllm_xargs": {"a": 1},
    "early_stopping": True, "typical_p": 0.5, "mirostat": 2, "repeat_penalty": 1.3,
    "dry_multiplier": 0.8, "xtc_probability": 0.5, "stop_regex": "a+", "lora_path": "x",
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", sorted(VALUES))
def test_what_would_change_an_answer_is_refused_by_name(
    server: Server, path: str, name: str
) -> None:
    good = {"messages": HELLO} if path == CHAT else {"prompt": "abc"}
    answer = server.post(path, {**good, "max_tokens": 2, name: VALUES[name]})
    assert answer.status == 400
    assert answer.error["param"] == name
    assert name in answer.error["message"]
    assert server.post(path, {**good, "max_tokens": 2, name: None}).status == 200


def test_continuous_usage_counts_in_every_chunk(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, more in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "abc"})):
        chunks = stream(server, path, stream_options=options, **more)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 6
        if path == CHAT:
            assert counts[0] == 0, "the first chunk has a role and no token"
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def test_a_chunk_carries_one_choice(server: Server) -> None:
    for path, more in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": ["abc", "xyz"]})):
        chunks = stream(server, path, n=3, seed=1, temperature=1.0, **more)
        assert {len(chunk["choices"]) for chunk in chunks} == {1}
        num = 3 if path == CHAT else 6
        ended = [c["index"] for k in chunks for c in k["choices"] if c["finish_reason"]]
        assert sorted(ended) == list(range(num))


def test_top_logprobs_contain_the_token_itself(server: Server) -> None:
    body = {"logprobs": 1, "temperature": 1.8, "seed": 3, "max_tokens": 12}
    found = server.complete("abc", **body).json["choices"][0]["logprobs"]
    outside = 0
    for token, value, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == value
        outside += len(top) == 2
    assert outside > 0, "the control: some token was not the likeliest"


def test_fields_that_clients_read_are_null_rather_than_absent(server: Server) -> None:
    completion, talk = server.complete("abc", max_tokens=2).json, chat(server)
    assert completion["choices"][0]["prompt_logprobs"] is None
    assert talk["prompt_logprobs"] is None
    assert completion["system_fingerprint"] is None
    assert talk["system_fingerprint"] is None
    chunks = [
        *stream(server, COMPLETIONS, prompt="abc"),
        *stream(server, CHAT, messages=HELLO),
    ]
    assert all(chunk["system_fingerprint"] is None for chunk in chunks)


def test_a_requests_own_id_comes_back(server: Server) -> None:
    sent = {"X-Request-Id": "req-7"}
    for answer in (
        server.send("GET", "/v1/models", headers=sent),
        server.send("GET", "/nothing", headers=sent),
        server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 1}, headers=sent),
        server.post(COMPLETIONS, {"prompt": "abc", "stream": True}, headers=sent),
    ):
        assert answer.headers["x-request-id"] == "req-7"
    assert "x-request-id" not in server.get("/v1/models").headers
    for bad in ("a b", "x" * 129):
        assert (
            "x-request-id"
            not in server.send("GET", "/health", headers={"X-Request-Id": bad}).headers
        )
    named = server.complete("abc", max_tokens=1, request_id="mine").json
    assert named["id"] == "cmpl-mine"


def test_tools_that_are_not_to_be_used_and_a_bare_tool_choice_pass(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    plain = chat(server)["choices"]
    assert chat(server, tools=[tool], tool_choice="none")["choices"] == plain
    assert chat(server, tool_choice="auto")["choices"] == plain
    assert chat(server, tools=[], tool_choice="none")["choices"] == plain


def test_what_an_assistant_called_is_named(server: Server) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = server.post(CHAT, {"messages": talk})
    assert answer.status == 400
    assert answer.error["param"] == "messages[1].tool_calls"


def test_a_conversation_may_end_within_the_assistants_message(server: Server, llm: LLM) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "once"}]
    body = {"messages": talk, "continue_final_message": True}
    tokens = server.post("/tokenize", body).json["tokens"]
    assert llm.tokenizing is not None
    rendered = llm.tokenizing.tokenizer.apply_chat_template(
        talk, tokenize=False, continue_final_message=True
    )
    assert tokens == llm.tokenizing.encode_rendered(rendered)
    assert rendered.endswith("once")
    closed = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json
    opened = server.post("/tokenize", {"messages": HELLO}).json
    assert opened["count"] > closed["count"]
    assert opened["tokens"][: closed["count"]] == closed["tokens"]
    usage = chat(server, messages=talk, continue_final_message=True)["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    for wrong in (
        {"messages": HELLO, "continue_final_message": True},
        {"messages": talk, "continue_final_message": True, "add_generation_prompt": True},
    ):
        answer = server.post(CHAT, wrong)
        assert answer.status == 400
        assert answer.error["param"] == "continue_final_message"


def test_template_arguments_reach_the_template_and_nothing_else(server: Server) -> None:
    assert chat(server, chat_template_kwargs={"enable_thinking": False})["choices"]
    for name in ("tokenize", "messages", "chat_template"):
        answer = server.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {name: "x"}})
        assert answer.status == 400
        assert answer.error["param"] == "chat_template_kwargs"
    answer = server.post(CHAT, {"messages": HELLO, "reasoning_effort": "low"})
    assert answer.status == 400
    assert answer.error["param"] == "reasoning_effort"


def test_token_ids_come_with_answers_and_streams(server: Server, llm: LLM) -> None:
    (expected,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6))
    choice = server.complete("abc", max_tokens=6, return_token_ids=True).json["choices"][0]
    assert choice["token_ids"] == list(expected.token_ids)
    assert choice["prompt_token_ids"] == list(llm.encode("abc"))
    talk = chat(server, return_token_ids=True)
    assert talk["prompt_token_ids"] == llm.encode_chat(HELLO)
    assert len(talk["choices"][0]["token_ids"]) == 6
    chunks = stream(server, COMPLETIONS, prompt="abc", return_token_ids=True)
    streamed = [t for k in chunks for c in k["choices"] for t in c.get("token_ids", ())]
    assert streamed == list(expected.token_ids)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list(llm.encode("abc"))
    assert "token_ids" not in server.complete("abc", max_tokens=1).json["choices"][0]


def test_tokens_may_be_named_by_their_ids(server: Server) -> None:
    body = {"max_tokens": 3, "logprobs": 1, "return_token_ids": True}
    choice = server.complete("abc", return_tokens_as_token_ids=True, **body).json["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in choice["token_ids"]]


def test_three_names_are_one_number_of_tokens(server: Server) -> None:
    assert server.complete("abc", n_predict=3).json["usage"]["completion_tokens"] == 3
    assert server.complete("abc", n_predict=3, max_tokens=3).status == 200
    answer = server.complete("abc", n_predict=3, max_tokens=4)
    assert answer.error["param"] == "n_predict"
    assert server.complete("abc", n_predict=-1).json["usage"]["completion_tokens"] == 16


def test_special_tokens_may_be_left_out(server: Server, llm: LLM) -> None:
    usage = server.complete("abc", max_tokens=1, add_special_tokens=False).json["usage"]
    assert llm.tokenizing is not None
    expected = llm.tokenizing.encode("abc", add_special_tokens=False)
    assert usage["prompt_tokens"] == len(expected)


def test_small_endpoints_of_other_servers_answer(server: Server) -> None:
    assert server.get("/ping").json == {"status": "ready"}
    assert server.post("/ping", {}).json == {"status": "ready"}
    assert server.get("/load").json == {"server_load": 0}
    with server.open_stream(max_tokens=2000):
        assert server.get("/load").json["server_load"] >= 1
        (load,) = server.get("/v1/loads").json["loads"]
        assert load["num_running_reqs"] + load["num_waiting_reqs"] == load["num_total_reqs"] >= 1
        assert load["num_used_tokens"] <= load["max_total_num_tokens"]
    info = server.get("/server_info").json
    assert info["max_model_len"] == MODEL_LEN
    assert info["fingerprint"] == server.get("/v1/kv/plan").json["fingerprint"]
    tokenizer = server.get("/tokenizer_info").json
    assert tokenizer["eos_token"]
    assert "message" in tokenizer["chat_template"]
    server.wait_idle(5)


def test_routers_learn_the_tokens_that_a_request_runs_as(server: Server) -> None:
    prompts = ["abc", [5, 6, 7]]
    found = server.post("/v1/completions/render", {"prompt": "abc", "max_tokens": 5}).json
    tokens = server.post("/tokenize", {"prompt": "abc"}).json["tokens"]
    assert [one["token_ids"] for one in found] == [tokens]
    found = server.post("/v1/completions/render", {"prompt": prompts[1]}).json
    assert [one["token_ids"] for one in found] == [prompts[1]]
    messages = [{"role": "user", "content": "hi"}]
    talk = server.post("/v1/chat/completions/render", {"messages": messages}).json
    assert talk["token_ids"] == server.post("/tokenize", {"messages": messages}).json["tokens"]
    assert server.post("/v1/chat/completions/render", {"messages": []}).status == 400
    assert server.post("/v1/completions/render", {"prompt": "a", "model": "other"}).status == 404


def test_waiting_requests_are_counted_by_reason(server: Server) -> None:
    text = server.get("/metrics").body.decode()
    for reason in ("capacity", "deferred"):
        assert (
            f'vllm:num_requests_waiting_by_reason{{model_name="{server.model.name}",reason="{reason}"}}'
            in text
        )


def test_the_request_log_has_a_line_for_each_request_and_no_contents(strict: Server) -> None:
    secret = "a very secret prompt"
    sent = {"X-Request-Id": "req-9"}
    strict.post(COMPLETIONS, {"prompt": secret, "max_tokens": 4}, headers=sent)
    strict.get(f"/{secret.replace(' ', '-')}")
    ended = time.monotonic() + 5
    own = re.compile(
        "kvant: request .*id=req-9|kvant: request - other"
    )  # others use the server too
    while len(lines := [line for line in strict.output if own.match(line)]) < 2:
        assert time.monotonic() < ended
        time.sleep(0.01)
    assert re.fullmatch(
        r"kvant: request POST /v1/completions 200 id=req-9 seconds=[\d.]+ prompt=\d+ cached=0 "
        r"new=\d first=[\d.]+\n",
        lines[0],
    )
    assert re.fullmatch(r"kvant: request - other 404 id=- seconds=[\d.]+\n", lines[1])
    assert "secret" not in "".join(strict.output)
