"""Another checkpoint's weights and KV scales in an engine that stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvant import LLM, SamplingParams
from kvant.errors import BadCheckpoint, NotServable, RequestError
from kvant.execution.runner import ModelRunner
from kvant.kv.format import Side
from tests.models import tiny
from tests.models.tiny_gguf import tensors, write_gguf
from tests.models.tiny_quantized import build_quantized

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPTS = [[3 + (7 * i + i * i) % 110 for i in range(n, 2 * n)] for n in (40, 5, 33)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


def open_(path: Path, device: str = "cpu", **options: Any) -> LLM:
    given = {"dtype": "float32", "batch_invariant": True, "kv_cache_memory": "64MiB", **options}
    return LLM(path, device=device, max_model_len=128, max_num_seqs=4, **given)


def answers(llm: LLM) -> list[object]:
    return [(r.token_ids, r.logprobs) for r in llm.generate(PROMPTS, PARAMS)]


def changed(path: Path, directory: Path, *, scale: float = 1.7, broken: bool = False) -> Path:
    """A copy with other weights, and with KV scales that are `scale` times as large."""
    copy = directory / "changed"
    shutil.copytree(path, copy)
    found = load_file(copy / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name, tensor in found.items():
        if name.endswith(("k_scale", "v_scale")):
            found[name] = tensor * scale
        elif name.endswith("weight_scale"):  # stays positive
            found[name] = tensor * (1 + 0.1 * torch.rand(tensor.shape, generator=generator))
        elif tensor.is_floating_point() and tensor.element_size() > 1 and tensor.dim() > 1:
            found[name] = tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
    if broken:
        found["model.norm.weight"][0] = float("nan")
    save_file(found, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.case("A51")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", [False, True], ids=["plain", "float8 weights"])
def test_answers_and_scales_are_those_of_an_engine_that_was_started_so(
    weights: bool, device: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    path, _ = build_quantized(tmp_path, weights=weights)
    other = changed(path, tmp_path)
    llm, expected = open_(path, device), answers(open_(other, device))
    assert answers(llm) != expected
    llm.refit(other)
    assert [r.num_cached_tokens for r in llm.generate(PROMPTS, PARAMS)] == [0, 0, 0]
    assert answers(llm) == expected
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    fresh = open_(other, device).engine.runner
    assert isinstance(fresh, ModelRunner)
    for layer in range(len(llm.plan.layers)):
        for side in (Side.K, Side.V):
            wanted = fresh.model.scales[layer, side]
            assert torch.equal(runner.model.scales[layer, side], wanted)
        assert torch.equal(runner.pool[layer].k_scale, fresh.pool[layer].k_scale)
        assert torch.equal(runner.pool[layer].v_scale, fresh.pool[layer].v_scale)
    assert llm.engine.audit_scales() == [], "the host knows the new scales too"
    assert answers(llm) == expected
    assert llm.model_path == other


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_every_kind_of_decoder_takes_new_weights(family: str, tmp_path: Path) -> None:
    path = tiny.build(family, tmp_path)
    other = changed(path, tmp_path)
    llm = open_(path, batch_invariant=False)
    llm.refit(other)
    assert answers(llm) == answers(open_(other, batch_invariant=False))


def test_weights_that_are_not_here_yet_are_fetched_or_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    first = write_gguf(tmp_path / "first.gguf")
    moved = {name: value + 0.25 * value.std() for name, value in tensors().items()}
    other = write_gguf(tmp_path / "other.gguf", values=moved)
    llm = open_(first, batch_invariant=False)
    before = answers(llm)
    llm.refit(other)
    assert answers(llm) == answers(open_(other, batch_invariant=False)) != before


def test_what_cannot_be_taken_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    path, _ = build_quantized(tmp_path, weights=False)
    llm = open_(path)
    before = answers(llm)
    with pytest.raises(BadCheckpoint):
        llm.refit(changed(path, tmp_path / "nan", broken=True))
    without, _ = build_quantized(tmp_path / "without", weights=False, kv_scheme=False)
    with pytest.raises(NotServable, match=r"config\.json"):
        llm.refit(without)
    longer = changed(path, tmp_path / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(NotServable, match=r"config\.json"):
        llm.refit(longer)
    assert answers(llm) == before


def test_weights_do_not_change_under_a_request(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    llm = open_(path)
    number = llm.engine.submit(PROMPTS[0], PARAMS)
    llm.engine.step()
    with pytest.raises(RequestError):
        llm.refit(changed(path, tmp_path))
    llm.engine.cancel(number)


def test_rounded_weights_are_not_exchanged(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    llm = open_(path, batch_invariant=False, quantization="int8")
    with pytest.raises(NotServable, match="rounded"):
        llm.refit(path)


def test_codes_that_nothing_declares_are_refused(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    llm = open_(path)
    before = answers(llm)
    other = tmp_path / "codes"
    shutil.copytree(path, other)
    found = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    found[name] = (256 * found[name]).to(torch.float8_e4m3fn)
    save_file(found, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=f"{name} has the dtype F8_E4M3"):
        llm.refit(other)
    assert answers(llm) == before
