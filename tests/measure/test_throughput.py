"""`kvant bench throughput`: every request is drawn as asked, and answers as much as asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvant.engine.llm import LLM
from kvant.errors import BadValue, RequestError
from kvant.measure.throughput import (
    Load,
    decode_limit,
    parse_load,
    parse_sampling,
    pool_tokens,
    run_load,
    step_bytes,
)
from kvant.sampling.sampling_params import SamplingParams
from tests.cli.command import kvant
from tests.engine import tiny_chat
from tests.models import families, tiny


def test_each_load_is_measured_with_each_sampling(tmp_path: Path) -> None:
    model, out = tiny.build("llama", tmp_path), tmp_path / "found.json"
    drawn = '{"temperature":0.6,"top_k":20,"top_p":0.95}'
    shown = kvant(
        "bench", "throughput", "-m", str(model), "--dtype", "float32", "--max-model-len", "64",
        "--load", "2x8/4", "--load", "1x4/2", "--repeats", "1",
        "--sampling", '{"temperature":0}', "--sampling", drawn, "--out", str(out),
    )  # fmt: skip
    assert shown.code == 0, shown.err
    rounds = json.loads(out.read_text())["rounds"]
    found = [(one["load"], one["sampling"]) for one in rounds]
    assert found == [
        (load, how) for load in ("2x8/4", "1x4/2") for how in ('{"temperature":0}', drawn)
    ]
    assert all(one["steps"] > 0 and min(one["seconds"]) > 0 for one in rounds)
    assert drawn in shown.out


def test_a_load_longer_than_a_sequence_may_be_is_refused_before_it_runs(tmp_path: Path) -> None:
    llm = LLM(tiny.build("qwen3", tmp_path), max_model_len=48, kv_cache_memory="4MB", device="cpu")
    run_load(llm, Load(1, 40, 8), SamplingParams(), seed=1)
    with pytest.raises(BadValue, match=r"--load 1x40/9 is longer") as caught:
        run_load(llm, Load(1, 40, 9), SamplingParams(), seed=1)
    assert "48 tokens" in caught.value.why
    assert not llm.engine.has_work


def test_no_load_is_measured_if_one_is_too_long(tmp_path: Path) -> None:
    model = tiny.build("llama", tmp_path)
    shown = kvant(
        "bench", "throughput", "-m", str(model), "--dtype", "float32", "--max-model-len", "64",
        "--load", "1x8/2", "--load", "2x60/5", "--repeats", "1",
    )  # fmt: skip
    assert shown.code == 2
    assert "--load 2x60/5 is longer than a sequence may be here" in shown.err
    exact = kvant(
        "bench", "throughput", "-m", str(model), "--dtype", "float32", "--max-model-len", "64",
        "--load", "1x62/2", "--repeats", "1",
    )  # fmt: skip
    assert exact.code == 0, exact.err


def test_a_request_that_fails_is_an_error_in_words(tmp_path: Path) -> None:
    path = tiny.build("qwen3", tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][:] = torch.finfo(torch.float32).max
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(path, max_model_len=48, kv_cache_memory="4MB", device="cpu")
    with pytest.raises(BadValue, match=r"--load 2x8/4: a request ended after 0 of 4") as caught:
        run_load(llm, Load(2, 8, 4), SamplingParams(temperature=0), seed=1)
    assert "NaN" in caught.value.why


def test_a_request_that_a_stop_string_ends_is_an_error_in_words(tmp_path: Path) -> None:
    llm = LLM(tiny_chat.build(tmp_path), max_model_len=48, kv_cache_memory="4MB", device="cpu")
    params = SamplingParams(temperature=0, stop_token_ids=tuple(range(llm.engine.vocab_size)))
    with pytest.raises(BadValue, match="after 1 of 4 tokens") as caught:
        run_load(llm, Load(1, 8, 4), params, seed=1)
    assert "'stop'" in caught.value.why


def test_a_sampling_is_what_a_request_could_ask() -> None:
    assert parse_sampling('{"top_p":0.9}').top_p == 0.9
    for wrong in ("[]", "0.6", "{", '{"temprature":1}'):
        with pytest.raises(BadValue):
            parse_sampling(wrong)
    with pytest.raises(RequestError, match="top_p"):
        parse_sampling('{"top_p":7}')


def test_a_load_is_three_whole_numbers() -> None:
    assert parse_load("32x128/256") == Load(32, 128, 256)
    for wrong in ("", "32", "32x128", "0x1/1", "ax1/1"):
        with pytest.raises(BadValue):
            parse_load(wrong)


def test_a_step_reads_weights_once_and_each_sequences_keys_and_values(tmp_path: Path) -> None:
    llm = LLM(
        tiny.build("qwen3", tmp_path), dtype="float32", max_model_len=48, kv_cache_memory="4MB", device="cpu"
    )  # fmt: skip
    files = load_file(tmp_path / "qwen3" / "model.safetensors")
    weights = sum(
        tensor.numel() * 4
        for name, tensor in files.items()
        if "embed_tokens" not in name or "lm_head.weight" not in files
    )
    one, eight = step_bytes(llm, 1, 20), step_bytes(llm, 8, 20)
    assert one == pytest.approx(weights + 20 * llm.plan.bytes_per_token, rel=1e-3)
    assert eight - one == 7 * 20 * llm.plan.bytes_per_token
    assert decode_limit(llm, Load(8, 16, 8), 1e9) == 8e9 / eight


def test_a_step_of_few_tokens_reads_a_part_of_the_experts(tmp_path: Path) -> None:
    path = tiny.build("qwen3_moe", tmp_path)
    llm = LLM(path, dtype="float32", max_model_len=48, kv_cache_memory="4MB", device="cpu")
    config = json.loads((path / "config.json").read_text())
    chosen, experts = config["num_experts_per_tok"], config["num_local_experts"]
    assert chosen < experts
    files = load_file(path / "model.safetensors")
    held = sum(t.numel() * 4 for name, t in files.items() if ".experts." in name)
    apart = step_bytes(llm, 64, 0) - step_bytes(llm, 1, 0)
    rare = (1 - chosen / experts) ** 64
    assert apart == pytest.approx(held * (1 - rare - chosen / experts), rel=1e-3)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_a_pool_of_groups_holds_the_sequences_that_the_plan_counts(
    family: str, tmp_path: Path
) -> None:
    families.build(family, tmp_path)
    llm = LLM(tmp_path, max_model_len=96, kv_cache_memory="2MB", device="cpu")
    assert llm.planned.layout is not None
    counted = llm.planned.num_sequences
    assert counted is not None
    assert pool_tokens(llm, 96) == 96 * counted
    pages = llm.engine.stats.num_usable_pages
    assert pool_tokens(llm, 96) != pages * llm.plan.page_size


def test_a_pool_without_groups_holds_a_token_in_every_row(tmp_path: Path) -> None:
    llm = LLM(tiny.build("qwen3", tmp_path), max_model_len=48, kv_cache_memory="1MB", device="cpu")
    rows = llm.engine.stats.num_usable_pages * llm.plan.page_size
    assert pool_tokens(llm, 7) == pool_tokens(llm, 48) == rows
