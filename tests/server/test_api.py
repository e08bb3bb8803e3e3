"""What the endpoints answer, over a real socket from real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvant.engine.llm import LLM
from kvant.kv.memory import format_size
from kvant.sampling.sampling_params import SamplingParams
from tests.server.conftest import DEFAULT
from tests.server.harness import COMMAND, MODEL_LEN, Server, events

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """As a user starts it. Other files' tests are answered by forked processes."""
    with Server(model, DEFAULT, is_real=True) as server:
        yield server


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, kv_cache_dtype="fp8_per_token_head", kv_cache_memory="4MiB")


def test_a_completion_is_the_engines_own_answer(server: Server, llm: LLM) -> None:
    (expected,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=24))
    answer = server.complete("abc", max_tokens=24)
    assert answer.status == 200
    (choice,) = answer.json["choices"]
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    assert answer.json["usage"]["completion_tokens"] == len(expected.token_ids)
    assert answer.json["model"] == server.model.name


def test_the_four_forms_of_a_prompt_give_the_same_answers(server: Server, llm: LLM) -> None:
    texts = ["abc", "xyz"]
    ids = [list(llm.encode(text)) for text in texts]
    one = server.complete(texts[0]).json["choices"]
    assert server.complete(ids[0]).json["choices"] == one
    both = server.complete(texts).json["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    assert both[0]["text"] == one[0]["text"]
    assert server.complete(ids).json["choices"] == both


def test_a_chat_is_written_out_by_the_models_template(server: Server, llm: LLM) -> None:
    prompt = llm.encode_chat(HELLO)
    (expected,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12))
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
    answer = server.post("/v1/chat/completions", body).json
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["choices"][0]["message"] == message
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    parts = [{"type": "text", "text": "hello"}]
    again = server.post(
        "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": parts}]}
    )
    assert again.json["choices"] == answer["choices"]


def test_a_stream_carries_the_same_text_a_role_usage_and_an_end(server: Server) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 12}
    whole = server.post("/v1/chat/completions", body).json
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = server.post("/v1/chat/completions", {**body, **options})
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.body)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["delta"].get("content", "") for k in chunks for c in k["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    reasons = [c["finish_reason"] for k in chunks for c in k["choices"]]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_cached_tokens_are_always_counted(server: Server) -> None:
    prompt = "a prompt of more than one page, asked twice: " * 2
    server.complete(prompt)
    usage = server.complete(prompt).json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < usage["prompt_tokens"]
    salted = server.complete(prompt, cache_salt="mine").json["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0, "another salt, another cache"


def test_n_answers_come_with_indices_and_repeat_with_their_seed(server: Server) -> None:
    more = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 8}
    first = server.complete(["abc", "xyz"], **more).json
    assert [choice["index"] for choice in first["choices"]] == list(range(6))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 6
    assert first["usage"]["prompt_tokens"] == 6
    again = server.complete(["abc", "xyz"], **more).json
    assert [choice["text"] for choice in again["choices"]] == texts


def test_logprobs_of_completions_and_chats(server: Server) -> None:
    found = server.complete("abc", max_tokens=4, logprobs=2).json["choices"][0]["logprobs"]
    assert {len(values) for values in found.values()} == {4}
    assert all(value <= 0 for value in found["token_logprobs"])
    assert found["text_offset"][0] == 0
    body = {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    chat = server.post("/v1/chat/completions", {**body, "temperature": 0}).json
    content = chat["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"]


def test_stop_strings_end_the_answer(server: Server) -> None:
    text = server.complete("abc", max_tokens=24).json["choices"][0]["text"]
    stop = text[5:8]
    choice = server.complete("abc", max_tokens=24, stop=[stop]).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == text[: text.index(stop)]


def test_models_tell_root_length_and_what_is_stored(server: Server) -> None:
    (found,) = server.get("/v1/models").json["data"]
    assert found["id"] == server.model.name
    assert found["root"] == str(server.model)
    assert found["max_model_len"] == MODEL_LEN
    assert "fp8_per_token_head" in found["kv_cache"]["stored_as"]
    planned = server.get("/v1/kv/plan").json["memory"]
    told = next(line for line in server.output if "KV cache:" in line)
    assert f"{format_size(planned['kv_bytes'])} hold {planned['capacity_tokens']:,} tokens" in told
    assert "plan" not in found["kv_cache"]  # clients ask often; /v1/kv/plan has all of it
    assert server.get(f"/v1/models/{found['id']}").json == found
    missing = server.get("/v1/models/another")
    assert missing.status == 404
    assert missing.error["code"] == "model_not_found"


def test_the_plan_is_the_one_that_kvant_plan_prints(server: Server) -> None:
    command = (*COMMAND[:-1], "plan", str(server.model), "--format", "json")
    flags = ("--kv-cache-dtype", "fp8_per_token_head", "--kv-cache-memory", "4MiB")
    printed = subprocess.run((*command, *flags), capture_output=True, check=True).stdout
    served, planned = server.get("/v1/kv/plan").json, json.loads(printed)
    assert served["fingerprint"] == planned["fingerprint"]
    assert served["target"]["bytes_per_token"] == planned["target"]["bytes_per_token"]
    stored = [[x["k"]["format"] for x in plan["target"]["layers"]] for plan in (served, planned)]
    assert stored[0] == stored[1]


def test_tokenize_and_detokenize_are_each_others_inverse(server: Server, llm: LLM) -> None:
    found = server.post("/tokenize", {"prompt": "héllo"}).json
    assert found["tokens"] == list(llm.encode("héllo"))
    assert found["count"] == len(found["tokens"])
    back = server.post("/detokenize", {"model": server.model.name, "tokens": found["tokens"]})
    assert back.json == {"prompt": "héllo"}
    chat = server.post("/tokenize", {"messages": HELLO}).json["tokens"]
    assert chat == llm.encode_chat(HELLO)


def test_health_readiness_and_version(server: Server) -> None:
    from kvant import __version__

    assert server.get("/health").json == {"status": "ready"}
    assert server.get("/ready").status == 200
    assert server.get("/version").json == {"version": __version__}


def test_openapi_describes_every_endpoint(server: Server) -> None:
    found = server.get("/openapi.json").json["paths"]
    assert set(found) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/tokenize",
        "/detokenize", "/health", "/ready", "/metrics", "/version", "/v1/kv/plan", "/openapi.json", "/infill",
        "/ping", "/load", "/v1/loads", "/server_info", "/v1/completions/render",
        "/v1/chat/completions/render", "/tokenizer_info",
        "/v1/embeddings", "/v1/responses", "/v1/responses/{id}", "/v1/responses/{id}/cancel",
        "/v1/responses/input_tokens",
        "/v1/kv/sessions", "/v1/kv/sessions/{id}",
        "/", "/v1/kv/live", "/v1/responses/{id}/input_items", "/v1/messages", "/v1/messages/count_tokens",
    }  # fmt: skip


def test_metrics_have_the_names_that_routers_and_dashboards_read(server: Server) -> None:
    before = server.metric("vllm:generation_tokens_total")
    server.complete("abc", max_tokens=5, ignore_eos=True)
    text = server.get("/metrics").body.decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "cache_config_info", "gpu_cache_usage_perc", "gpu_prefix_cache_hits",
        "gpu_prefix_cache_queries", "prefix_cache_hits", "prefix_cache_queries",
        "e2e_request_latency_seconds", "time_to_first_token_seconds",
        "inter_token_latency_seconds", "prompt_tokens", "generation_tokens",
        "request_success", "request_prompt_tokens", "request_generation_tokens",
        "num_preemptions", "request_params_n", "request_params_max_tokens",
        "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds",
        "request_time_per_output_token_seconds", "request_max_num_generation_tokens",
        "iteration_tokens_total", "corrupted_requests",
    ):  # fmt: skip
        assert f"vllm:{name}" in families
    counted = [line.split("{")[0].split()[0] for line in text.splitlines() if line[:1] != "#"]
    for name in ("gpu_prefix_cache_hits_total", "gpu_prefix_cache_queries_total"):
        assert f"vllm:{name}" in counted
    assert server.metric("vllm:generation_tokens_total") == before + 5
    info = families["vllm:cache_config_info"].samples[0].labels
    assert info["block_size"] == "16"


def test_metrics_tell_what_every_layer_stores(server: Server) -> None:
    text = server.get("/metrics").body.decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    layers = families["kvant:layer_kv_bytes_per_token"].samples
    planned = server.get("/v1/kv/plan").json["target"]["layers"]
    found = {(s.labels["layer"], s.labels["k"], s.labels["v"]): s.value for s in layers}
    assert found == {
        (str(x["layer"]), x["k"]["format"], x["v"]["format"]): x["bytes_per_token"] for x in planned
    }
    held = server.metric("kvant:kv_bytes_held")
    per_page = server.metric("kvant:kv_bytes_per_token") * 16
    assert held == server.metric("kvant:pages_held") * per_page


def test_metrics_tell_where_the_time_of_a_request_went(server: Server) -> None:
    names = ("queue", "prefill", "decode", "inference")
    names = tuple(f"vllm:request_{name}_time_seconds" for name in names)
    before = {name: server.metric(f"{name}_sum") for name in names}
    count = server.metric(f"{names[0]}_count")
    tokens = server.metric("vllm:iteration_tokens_total_sum")
    started = time.monotonic()
    server.complete("abc", max_tokens=20, ignore_eos=True)
    took = time.monotonic() - started
    queue, prefill, decode, inference = (server.metric(f"{n}_sum") - before[n] for n in names)
    assert server.metric(f"{names[0]}_count") == count + 1
    assert inference == pytest.approx(prefill + decode)
    assert 0 < queue + inference < took
    assert min(prefill, decode) > 0
    assert server.metric("vllm:iteration_tokens_total_sum") - tokens == 3 + 20


def test_labels_come_from_closed_sets(server: Server) -> None:
    for path in ("/v1/strange", "/v1/models/strange", "//v1/models"):
        assert server.get(path).status == 404
        assert server.send("BREW", path).status in (404, 405)
    text = server.get("/metrics").body.decode()
    assert "strange" not in text
    assert "BREW" not in text


def test_the_api_process_never_imports_torch(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    engine = Path(f"/proc/{server.engine_pid()}/maps").read_text()
    assert "libtorch" in engine, "the control: it is seen where it is"


def test_nothing_listens_but_the_one_port(server: Server) -> None:
    listening = set()
    for pid in (server.process.pid, server.engine_pid()):
        sockets = {
            str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
        }
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                listening.add((address, int(port, 16)))
    assert listening == {("0100007F", server.port)}


def test_help_and_plan_need_none_of_the_servers_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('starlette', 'uvicorn', 'zmq', 'msgspec', 'prometheus_client', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from kvant.cli.main import run\n"
        "sys.argv = ['kvant', *sys.argv[1:]]\n"
        "run()\n"
    )
    shown = subprocess.run(
        (sys.executable, "-c", code, "serve", "--help"), capture_output=True, text=True, check=True
    )
    assert "--served-model-name" in shown.stdout
