"""`LLM`: what a Python program may rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvant
from kvant import LLM, SamplingParams
from kvant.engine.build import build_engine
from kvant.engine.llm import Prompt
from kvant.errors import BadValue, DoesNotFit, KvantError, NotServable, RequestError, UnknownName
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import KVDtype
from kvant.plan.budget import CPU_SHARE
from kvant.plan.config import config_of
from kvant.plan.device import free_host_bytes
from kvant.plan.facts import DeviceMemory
from kvant.server import engine_process
from tests.engine import tiny_chat
from tests.models import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return make(path)


def make(path: Path, **changes: Any) -> LLM:
    return LLM(
        path, **{"dtype": "float32", "kv_cache_memory": "4MiB", "max_model_len": 256, **changes}
    )


def test_prompts_are_texts_or_token_ids_one_or_several(llm: LLM) -> None:
    ids = list(llm.encode("Hello"))
    (from_text,) = llm.generate("Hello", GREEDY)
    (from_ids,) = llm.generate(ids, GREEDY)
    prompts: list[Prompt] = ["Hello", ids, "other"]
    both = llm.generate(prompts, GREEDY)
    assert from_text.token_ids == from_ids.token_ids == both[0].token_ids == both[1].token_ids
    assert both[2].token_ids != from_text.token_ids
    assert from_text.prompt_token_ids == tuple(ids)
    assert (from_text.num_prompt_tokens, len(from_text.token_ids)) == (5, 12)
    assert from_text.finish_reason == "length"
    assert llm.generate([], GREEDY) == []


def test_text_is_the_answer_without_the_prompt(llm: LLM) -> None:
    (result,) = llm.generate("Hello", GREEDY)
    assert llm.tokenizing is not None
    assert result.text == llm.tokenizing.backend.decode(list(result.token_ids))


def test_every_prompt_can_have_its_own_parameters(llm: LLM) -> None:
    results = llm.generate(
        ["a", "b"], [GREEDY, SamplingParams(temperature=1, seed=3, max_tokens=5, ignore_eos=True)]
    )
    assert [len(r.token_ids) for r in results] == [12, 5]
    with pytest.raises(RequestError, match="2 prompts and 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate("Hello", GREEDY)
    stop = whole.text[4:7]
    assert stop
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop)
    (result,) = llm.generate("Hello", params)
    assert result.text == whole.text[: whole.text.index(stop)]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]


def test_eos_is_in_the_tokens_and_not_in_the_text(path: Path) -> None:
    eos = tiny_chat.END
    llm = make(path)
    params = SamplingParams(temperature=3, max_tokens=60, skip_special_tokens=False)
    ended = next(
        result
        for seed in range(50)
        for result in llm.generate("x", SamplingParams(**{**_fields(params), "seed": seed}))
        if result.finish_reason == "stop"
    )
    assert ended.token_ids[-1] == eos
    assert eos not in ended.token_ids[:-1]
    assert "<|im_end|>" not in ended.text


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__slots__}


def test_one_wrong_request_runs_none_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="300 tokens"):
        llm.generate([llm.encode("fine"), [5] * 300], GREEDY)
    assert not llm.engine.has_work
    with pytest.raises(RequestError, match="not valid Unicode"):
        llm.generate("\ud800", GREEDY)
    assert llm.generate("fine", GREEDY)[0].finish_reason == "length"


def test_pieces_of_a_stream_are_the_result(llm: LLM) -> None:
    *_, (whole,) = [llm.generate("Hello", GREEDY)]
    pieces = list(llm.stream("Hello", GREEDY))
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == list(whole.token_ids)
    assert pieces[-1].result is not None
    assert pieces[-1].result.text == whole.text


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    (result,) = llm.generate("Hello", params)
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in result.logprobs)


def test_a_conversation_follows_the_models_template(llm: LLM) -> None:
    ids = llm.encode_chat([{"role": "user", "content": "Hi"}])
    assert llm.tokenizing is not None
    text = llm.tokenizing.backend.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_tokenizer_takes_token_ids_only(tmp_path: Path) -> None:
    llm = make(tiny.build("llama", tmp_path))
    assert llm.generate([5, 6, 7], GREEDY)[0].text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text", GREEDY)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "fp8", "int4_per_token_head"])
def test_what_is_allocated_is_what_was_planned(path: Path, kv_cache_dtype: str) -> None:
    llm = make(path, kv_cache_dtype=kv_cache_dtype, kv_cache_memory="3MiB")
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    planned = llm.planned.memory.kv_bytes
    assert planned is not None
    assert abs(runner.pool.num_bytes - planned) <= 0.02 * planned
    assert 0.98 * 3 * 2**20 <= planned <= 3 * 2**20
    assert {choice.dtype for layer in llm.plan.layers if (choice := layer.k)} == {
        KVDtype[{"fp8": "FP8_E4M3"}.get(kv_cache_dtype, kv_cache_dtype.upper())]
    }


def test_by_default_pages_take_a_share_of_free_memory_but_no_more_than_can_be_used(
    path: Path,
) -> None:
    llm = LLM(path, max_num_seqs=3, max_model_len=100, page_size=16)
    assert llm.planned.memory.num_pages == 3 * 7 + 1  # the scratch page too
    assert llm.planned.memory.kv_bytes is not None
    assert llm.planned.memory.kv_bytes < CPU_SHARE * free_host_bytes()


def test_warnings_about_speed_and_precision_reach_python_programs_and_servers(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = make(path, dtype="float64")
    assert any("reference backend, which is slow" in line for line in slow.warnings)
    assert set(slow.warnings) <= set(caplog.messages)
    config = config_of(path, {"kv_cache_dtype": "fp8_e4m3", "kv_cache_memory": "4MiB"})
    built = build_engine(config)
    assert any("without calibrated scales" in line for line in built.warnings)
    assert {f"warning: {line}" for line in built.warnings} <= {*engine_process._ready(built).notes}


def test_tensors_that_nothing_uses_are_named_and_scales_are_the_plans_business(
    tmp_path: Path,
) -> None:
    model = tiny_chat.build(tmp_path)
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    weights["vision.patches.weight"] = torch.ones(2)
    save_file(weights, file, metadata={"format": "pt"})
    (note,) = [line for line in make(model).notes if "unused" in line]
    assert note == (
        "vision.patches.weight (numbers) is unused: the model that runs has no such weight"
    )


def test_steps_that_cannot_be_recorded_are_a_warning_of_a_running_engine(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise NotServable("steps cannot be recorded", why="an operation waits for the device")

    monkeypatch.setattr("kvant.execution.runner.ModelRunner.capture", refuse)
    llm = make(path)
    assert "steps cannot be recorded (an operation waits for the device)" in llm.warnings
    assert llm.warnings[-1] in caplog.messages
    assert llm.generate("a", GREEDY)


@pytest.mark.parametrize("part", ["runner.KVPool", "runner.ModelRunner.capture"])
def test_memory_that_another_process_took_is_reported_and_the_way_out_works(
    path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nA trace.")

    with monkeypatch.context() as patched:
        patched.setattr(f"kvant.execution.{part}", fail)
        with pytest.raises(DoesNotFit) as refused:
            make(path)
    assert refused.value.why == "CUDA out of memory. Tried to allocate 2 GiB."
    flag, size = refused.value.ways_out[0].arguments
    assert flag == "--kv-cache-memory"
    assert make(path, kv_cache_memory=size).generate("a", GREEDY)


def test_an_unset_context_becomes_what_fits_and_says_so(path: Path) -> None:
    page_bytes = 16 * 4 * 2 * 2 * 16 * 4  # 16 tokens, 4 layers, K and V, 2 heads of 16 float32
    tight = make(path, kv_cache_memory=9 * page_bytes, max_model_len=None)
    assert tight.engine.limits.max_model_len == 128
    assert any("max_model_len is 128" in note for note in tight.notes)
    assert make(path, max_model_len=None).notes == ()


def test_an_explicit_context_that_does_not_fit_is_refused_and_its_ways_out_work(path: Path) -> None:
    with pytest.raises(DoesNotFit) as caught:
        make(path, kv_cache_memory="64KiB", kv_cache_dtype="float32")
    held = {line.split()[1]: int(line.split()[3]) for line in caught.value.tried}
    assert held["float32"] < held["bfloat16"] < held["int4_per_token_head"]
    for way in caught.value.ways_out:
        flag, value = way.arguments
        number = int(value) if value.isdigit() else value
        change = {flag.removeprefix("--").replace("-", "_"): number}
        llm = make(path, **{"kv_cache_memory": "64KiB", "kv_cache_dtype": "float32", **change})
        assert llm.generate("a", GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("length", [None, 100])
def test_a_pool_without_a_single_page_is_refused_and_the_way_out_works(
    path: Path, length: int | None
) -> None:
    with pytest.raises(DoesNotFit, match="not a single page") as caught:
        make(path, kv_cache_memory=100, max_model_len=length)
    (way,) = caught.value.ways_out
    assert make(path, kv_cache_memory=way.arguments[1], max_model_len=length).generate("a", GREEDY)


def test_more_than_the_machine_has_is_refused_before_weights_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = DeviceMemory(free=8 * 2**20, total=8 * 2**20)
    monkeypatch.setattr("kvant.plan.read_facts.device_memory", lambda *_: little)
    with monkeypatch.context() as patch:
        patch.setattr("kvant.models.load.load_model", _must_not_be_called)
        with pytest.raises(DoesNotFit, match=r"8.00 MiB that are free") as caught:
            make(path, kv_cache_memory="8MiB")
    way = next(way for way in caught.value.ways_out if way.arguments)
    assert make(path, kv_cache_memory=way.arguments[1]).generate("a", GREEDY)


def _must_not_be_called(*_: object, **__: object) -> None:
    raise AssertionError("weights were read")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"kv_cache_dtype": "fp9"}, UnknownName),
        ({"dtype": "float7"}, UnknownName),
        ({"attention_backend": "magic"}, UnknownName),
        ({"kv_cache_memory": "much"}, BadValue),
        ({"max_num_seqs": 10**8}, BadValue),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 512}}, BadValue),
        ({"device": "tpu"}, UnknownName),
        ({"max_num_seqs": 0}, BadValue),
        ({"max_model_len": 0}, BadValue),
        ({"max_model_len": 10**6}, BadValue),
        ({"page_size": 0}, BadValue),
        ({"page_size": 8, "block_size": 16}, BadValue),
        ({"kv_cache_dtype_skip_layers": [99]}, BadValue),
        ({"revision": "main"}, BadValue),
        ({"kv_cache_dytpe": "fp8"}, UnknownName),
        ({"tensor_parallel_size": 3}, NotServable),
        ({"calculate_kv_scales": True}, NotServable),
    ],
)
def test_what_cannot_be_is_refused(
    path: Path, changes: dict[str, Any], fault: type[Exception]
) -> None:
    with pytest.raises(fault):
        make(path, **changes)


def test_formats_are_named_layer_by_layer_with_who_asked(path: Path) -> None:
    llm = make(
        path, kv_cache_dtype="fp8_per_token_head", kv_cache_dtype_skip_layers=[0, -1],
        kv_cache_rules=["1:k=int8_per_token_head"], block_size=8,
    )  # fmt: skip
    keys = [layer.k for layer in llm.plan.layers]
    assert [k.dtype.format.name for k in keys if k] == [
        "float32",
        "int8_per_token_head",
        "fp8_per_token_head",
        "float32",
    ]
    assert keys[2] is not None
    assert "kv_cache_dtype='fp8_per_token_head'" in keys[2].because
    assert llm.plan.page_size == 8


def test_the_environment_asks_less_loudly_than_the_argument(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVANT_KV_CACHE_DTYPE", "int8_per_token_head")
    key = make(path).plan.layers[0].k
    assert key is not None
    assert key.dtype is KVDtype.INT8_PER_TOKEN_HEAD
    assert "KVANT_KV_CACHE_DTYPE" in key.because
    key = make(path, kv_cache_dtype="bfloat16").plan.layers[0].k
    assert key is not None
    assert key.dtype is KVDtype.BFLOAT16


@pytest.mark.parametrize("name", ["LLM", "AsyncLLM"])
def test_importing_kvant_or_a_refusal_loads_no_torch(name: str) -> None:
    """How OpenMP's threads wait can be set only before torch is there."""
    code = (
        f"import sys, kvant; assert kvant.SamplingParams and kvant.{name}\n"
        f"try: kvant.{name}('/nowhere/at-all')\n"
        "except kvant.errors.ModelNotFound: pass\n"
        "else: raise SystemExit('found?')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_public_names_are_listed() -> None:
    assert set(kvant.__all__) <= set(dir(kvant))
    with pytest.raises(AttributeError, match="LLMM"):
        _ = kvant.LLMM


def test_conversations_are_answered_one_or_several(llm: LLM) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    ho = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ho"}]
    (one,) = llm.chat(hi, GREEDY)
    assert one.token_ids == llm.generate(llm.encode_chat(hi), GREEDY)[0].token_ids
    both = llm.chat(
        [hi, ho], [GREEDY, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)]
    )
    assert both[0].token_ids == one.token_ids
    assert len(both[1].token_ids) == 3
    assert llm.chat([], GREEDY) == []


@pytest.mark.parametrize(
    "prompts", [None, 5, b"abc", [None], [b"abc"], [1.5], torch.tensor([3, 4]), np.array([3, 4])]
)
def test_what_is_no_prompt_is_refused_in_words(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="text or a list of token ids") as refused:
        llm.generate(prompts, GREEDY)
    assert ("tolist" in str(refused.value)) == hasattr(prompts, "tolist")
    assert llm.metrics()["num_waiting"] == 0


@pytest.mark.parametrize("params", ["greedy", {"temperature": 0}, [{"temperature": 0}], 5])
def test_what_is_no_sampling_params_is_refused_in_words(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="is a SamplingParams"):
        llm.generate(["a"], params)


def test_without_parameters_the_model_decides(path: Path, tmp_path: Path) -> None:
    assert make(path).default_params == SamplingParams()
    other = tiny_chat.build(tmp_path)
    (other / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": [2, 70]}')
    llm = make(other)
    assert llm.default_params == SamplingParams(temperature=0)
    assert llm.generate("Hello")[0].token_ids[:12] == llm.generate("Hello", GREEDY)[0].token_ids


def test_metrics_are_the_engines_numbers(llm: LLM) -> None:
    before = llm.metrics()
    llm.generate("Hello", GREEDY)
    after = llm.metrics()
    assert after["num_steps"] - before["num_steps"] == 12
    assert (after["num_running"], after["num_held_pages"]) == (0, 0)


def test_dummy_weights_need_no_weight_files_and_say_so(tmp_path: Path) -> None:
    built = tiny.build("qwen3", tmp_path / "whole")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((built / "config.json").read_bytes())
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def answer() -> tuple[int, ...]:
        llm = LLM(bare, max_model_len=64, device="cpu", load_format="dummy")
        assert any("--load-format dummy" in note for note in llm.notes)
        assert not [line for line in llm.warnings if "not loaded" in line]
        return llm.generate([[3, 17, 5]], params)[0].token_ids

    assert answer() == answer()
    with pytest.raises(KvantError):
        LLM(bare, max_model_len=64, device="cpu")


def test_values_beyond_a_format_are_counted_by_layer_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_chat.build(tmp_path)
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.self_attn.v_proj.weight"] *= 1e6
    save_file(weights, file, metadata={"format": "pt"})
    llm = make(model, kv_cache_dtype="fp8_e4m3")
    assert llm.metrics()["kv_saturated_values"] == {}
    for _ in range(2):
        llm.generate("a prompt of so many tokens that it is looked at", GREEDY)
    found = llm.metrics()["kv_saturated_values"]
    assert list(found) == ["1"]
    assert found["1"]["k"] == 0
    assert found["1"]["v"] > 100
    told = [line for line in caplog.messages if "beyond" in line]
    assert len(told) == 1
    assert " of V in fp8_e4m3)" in told[0]
    assert "layer 1 (" in told[0]
    assert llm.metrics()["kv_saturated_values"] == found


def test_a_format_that_holds_everything_counts_nothing(llm: LLM) -> None:
    llm.generate("a prompt of so many tokens that it is looked at", GREEDY)
    assert llm.metrics()["kv_saturated_values"] == {}


def test_experts_compute_in_float64_too(tmp_path: Path) -> None:
    path = tiny.build("gpt_oss", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    wide, usual = (
        LLM(path, dtype=dtype, max_model_len=64, device="cpu").generate([[5, 6, 7, 8]], params)
        for dtype in ("float64", "float32")
    )
    assert wide[0].token_ids == usual[0].token_ids
