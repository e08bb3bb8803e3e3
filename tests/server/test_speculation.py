"""A server that drafts: the same answers, streamed, and the counters that dashboards read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvant import LLM, SamplingParams
from tests.server.harness import Server, build_model

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("spec"))


def test_a_server_with_drafts_gives_the_same_answers_and_counts_drafts(model: Path) -> None:
    body = {
        "prompt": "abc abc abc abc", "max_tokens": 48, "temperature": 0, "ignore_eos": True,
        "logprobs": 1, "return_token_ids": True,
    }  # fmt: skip
    llm = LLM(model, dtype="float64", kv_cache_memory="4MB", max_model_len=512)
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    (plain,) = llm.generate("abc abc abc abc", params)
    streamed = ""
    flags = ("--dtype", "float64", "--kv-cache-memory", "4MB", "--max-model-len", "512")
    with Server(model, (*flags, "--speculative-config", json.dumps(NGRAM))) as server:
        answer = server.post("/v1/completions", body).json["choices"][0]
        raw = server.post("/v1/completions", {**body, "stream": True}).body.decode()
        for line in raw.splitlines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                streamed += choices[0]["text"] if choices else ""
        text = server.get("/metrics").body.decode()
    assert answer["text"] == plain.text == streamed
    assert answer["token_ids"] == list(plain.token_ids)
    assert len(answer["logprobs"]["tokens"]) == len(plain.token_ids)

    def value(name: str) -> float:
        found = re.search(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not among the metrics"
        return float(found[1])

    assert value("vllm:spec_decode_num_drafts_total") > 0
    drafted = value("vllm:spec_decode_num_draft_tokens_total")
    accepted = value("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 <= accepted <= drafted
    each = re.findall(r'per_pos_total{model_name=".*",position="(\d)"} (\S+)', text)
    assert [int(place) for place, _ in each] == [0, 1, 2, 3]
    assert sum(float(count) for _, count in each) == accepted
    assert value("kvant:spec_decode_pays") == 1
