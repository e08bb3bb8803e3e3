"""Weights quantised while they are loaded: the same model with rounded weights, in the planned bytes."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kvant import LLM
from kvant.attention.cpu.backend import CpuBackend
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import NotServable
from kvant.kv.checkpoint.json_file import read_json_object
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.cpu import weights
from kvant.models.cpu.parts import Mixture, read_part
from kvant.models.cpu.rounding import EIGHT_BITS
from kvant.models.cpu.verify import rounded as rounded_rows
from kvant.models.cpu.weights import INT4 as INT4_CODE
from kvant.models.cpu.weights import Code, pack, pack_narrow, pack_rounded, unpack
from kvant.models.forward_info import ForwardFacts
from kvant.models.fused.decoder import fuse
from kvant.models.fused.experts import Experts, Shared
from kvant.models.fused.feed_forward import Dense
from kvant.models.fused.layers import Layer
from kvant.models.fused.linear import NarrowProduct
from kvant.models.fused.recipe import Activation
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.quantization import Quantization, check_quantization
from kvant.models.select import select_forward
from kvant.models.weights import quantized_weight_bytes
from kvant.weights.codecs import NarrowWeight, decode, encode
from kvant.weights.format import WeightFormat
from tests.attention import driver
from tests.models import loading, tiny

INT8, INT4 = Quantization.INT8, Quantization.INT4
CODES = {INT8: (Code.INT8, Code.INT8), INT4: (INT4_CODE, Code.INT8)}
TEXT = [(7 * i + i * i) % 120 + 3 for i in range(45)]
CPU, GPU = DeviceFacts(DeviceKind.CPU), DeviceFacts(DeviceKind.CUDA, "sm_90")
BOUND = 3e-5


def load(path: Path, family: str, quantization: Quantization, **changes: Any) -> LoadedModel:
    geometry = tiny.geometry(family, **changes)
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    return loading.load(path, plan, geometry, quantization=quantization)


def logits(model: LoadedModel, chunks: list[int]) -> Tensor:
    steps = driver.Driver(driver.pool(model.plan, 40), CpuBackend())
    text = driver.Text(TEXT)
    found = []
    for chunk in chunks:
        ids, call, _ = steps.call([(text, chunk)])
        found.append(model.forward(ids, call, torch.arange(chunk)))
    return torch.cat(found)


def rounded(path: Path, quantization: Quantization) -> Tensor:
    """Logits of transformers' model with weights as `unpack` gives them."""
    model = AutoModelForCausalLM.from_pretrained(path)
    layers, head = CODES[quantization]
    embedding, tied = model.get_input_embeddings().weight, model.get_output_embeddings()
    if tied.weight is embedding:
        tied.weight = nn.Parameter(embedding.detach().clone())
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.Linear):
                code = head if part is tied else layers
                part.weight.copy_(unpack(pack(part.weight.detach(), code)))
        found: Tensor = model(torch.tensor([TEXT])).logits[0]
    return found


@pytest.mark.parametrize("quantization", CODES, ids=lambda q: q.value)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_quantised_model_is_the_model_with_rounded_weights_in_the_planned_bytes(
    family: str, tied: bool, quantization: Quantization, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path, tie_word_embeddings=tied)
    model = load(path, family, quantization)
    expected, found = rounded(path, quantization), logits(model, [45])
    assert (found - expected).abs().max() < BOUND * expected.abs().max()
    assert torch.equal(logits(model, [1] * 45), found)
    assert torch.equal(logits(model, [20, 25]), found)
    planned = quantized_weight_bytes(
        read_json_object(path / "config.json"), tiny.geometry(family), quantization
    )
    buffers = sum(b.numel() * b.element_size() for b in model._module.buffers())
    assert planned.bytes == model.num_weight_bytes - buffers


def test_rounding_changes_logits_and_four_bits_change_them_more(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    exact = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([TEXT])).logits[0].detach()
    errors = [(logits(load(path, "llama", q), [45]) - exact).abs().mean() for q in (INT8, INT4)]
    assert 0 < 4 * errors[0] < errors[1]


def test_the_flag_reaches_the_engine_and_the_plan(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    llm = LLM(path, quantization="int8", max_model_len=64)
    assert llm.engine.runner.model.quantization is INT8  # type: ignore[attr-defined]
    assert llm.planned.request.quantization is INT8
    assert (llm.planned.weights_bytes or 0) < (
        LLM(path, max_model_len=64).planned.weights_bytes or 0
    )


@pytest.mark.parametrize(
    ("config", "device", "compute", "says"),
    [
        ({}, GPU, ComputeDtype.FLOAT32, "float32 on a GPU"),
        ({}, CPU, ComputeDtype.BFLOAT16, "bfloat16"),
        ({"model_type": "gemma2"}, CPU, ComputeDtype.FLOAT32, "gemma2"),
        ({"layer_types": ["full_attention"] * 4, "model_type": "mistral"}, CPU,
         ComputeDtype.FLOAT32, "layer_types"),
        ({"hidden_act": "gelu"}, CPU, ComputeDtype.FLOAT32, "gelu"),
        ({"hidden_size": 24}, CPU, ComputeDtype.FLOAT32, "multiple of 32"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            CPU, ComputeDtype.FLOAT32, "quantised already",
        ),
    ],
    ids=["gpu", "bfloat16", "family", "ministral", "gelu", "shape", "quantised"],
)  # fmt: skip
def test_what_cannot_be_quantised_is_refused_with_the_reason_and_a_way_out(
    config: dict[str, Any], device: DeviceFacts, compute: ComputeDtype, says: str
) -> None:
    def plan(changes: dict[str, Any]) -> None:
        whole = {"model_type": "llama", "intermediate_size": 96, "hidden_size": 64, **changes}
        geometry = replace(
            tiny.geometry("llama"),
            model_type=whole["model_type"],
            hidden_size=whole["hidden_size"],
        )
        check_quantization(INT8, device, compute)
        select_forward(ForwardFacts(whole, geometry, compute, device, INT8))

    with pytest.raises(NotServable, match=says) as refused:
        plan(config)
    assert refused.value.ways_out
    device, compute = CPU, ComputeDtype.FLOAT32
    plan({})


def test_a_model_with_windows_is_quantised_like_any_other(tmp_path: Path) -> None:
    path = tiny.build("mistral", tmp_path)
    model = load(path, "mistral", INT8)
    expected, found = rounded(path, INT8), logits(model, [45])
    assert (found - expected).abs().max() < BOUND * expected.abs().max()


def test_shared_experts_round_activations_as_other_layers_do(tmp_path: Path) -> None:
    path = tiny.build("qwen3_moe", tmp_path, vocab_size=tiny.VOCAB)
    geometry = tiny.geometry("qwen3_moe")
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    model = loading.load(path, plan, geometry, only=MODULES)
    layer = fuse(model._module, model.plan).model.layers[0]
    assert isinstance(layer, Layer)
    assert isinstance(layer.feed_forward, Experts)
    hidden = layer.feed_forward.router[0].shape[1]

    def narrow(rows: int, columns: int) -> NarrowProduct:
        return NarrowProduct(encode(torch.randn(rows, columns), Code.Q8_0.format), None)

    dense = Dense(narrow(128, hidden), narrow(hidden, 64), Activation.SILU)
    experts = replace(layer.feed_forward, shared=Shared(dense))
    part = read_part(replace(layer, feed_forward=experts), None, EIGHT_BITS)
    assert isinstance(part.feed_forward, Mixture)
    assert part.feed_forward.shared is not None
    (up,) = part.feed_forward.shared.up
    x = torch.randn(3, hidden)
    expected = rounded_rows(x) @ unpack(up.weight).to(torch.float64).T
    torch.testing.assert_close(up(x).to(torch.float64), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="maps of files are Linux's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_rounding_holds_one_wide_matrix_at_a_time(
    dtype: torch.dtype, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the wide matrices outside the files whenever one is rounded, and after the last."""
    path = tiny.build("llama", tmp_path, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_pretrained(path, dtype=dtype).save_pretrained(path)
    shapes = {(64, 64), (32, 64), (128, 64), (96, 64), (192, 64), (64, 96)}
    encode_really = weights.encode
    alive: list[int] = []

    def wide() -> int:
        gc.collect()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        files = [
            tuple(int(place, 16) for place in line[0].split("-"))
            for line in lines if line[-1].endswith(".safetensors")
        ]  # fmt: skip
        found = {
            one.data_ptr()
            for one in gc.get_objects()
            if isinstance(one, Tensor) and one.is_floating_point() and tuple(one.shape) in shapes
        }
        return sum(not any(begin <= one < end for begin, end in files) for one in found)

    def counted(weight: Tensor, fmt: WeightFormat) -> NarrowWeight:
        alive.append(wide())
        return encode_really(weight, fmt)

    monkeypatch.setattr(weights, "encode", counted)
    gc.collect()
    gc.freeze()  # what lives already is neither searched nor counted
    try:
        model = load(path, "llama", Quantization.INT4)
        embedding = 1  # [128, 64], which the model keeps in float32
        assert max(alive) <= 1 + embedding
        assert wide() <= embedding
    finally:
        gc.unfreeze()
    assert logits(model, [len(TEXT)]).isfinite().all()


@pytest.mark.parametrize("code", [INT4_CODE, Code.INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_have_the_bytes_of_the_whole_weight(
    code: Code, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined weights whose rows begin and end inside tiles and parts."""
    joined = [torch.randn(rows, 96).to(dtype) for rows in (40, 1, 7, 150, 23)]
    narrow = encode(torch.cat(joined), code.format)
    whole = pack_narrow(narrow)
    for most in (1, 32 * 96, 100 * 96):
        monkeypatch.setattr(weights, "_MOST_AT_ONCE", most)
        for found in (pack_rounded(joined, code), pack_narrow(narrow)):
            assert torch.equal(found.codes, whole.codes)
            if whole.scales is not None:
                assert found.scales is not None
                assert torch.equal(found.scales, whole.scales)
    assert torch.equal(unpack(whole), decode(narrow))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are Linux's")
@pytest.mark.parametrize("code", [INT4_CODE, Code.INT8])
def test_rounding_needs_little_memory_beside_its_result(
    code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kib(name: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{name}:")[1].split()[0])

    monkeypatch.setattr(weights, "_MOST_WORKERS", 2)
    parts = [torch.ones(4096, 4096, dtype=torch.bfloat16) for _ in range(2)]
    pack_rounded([parts[0][:512]], code)  # libraries take memory at their first call
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = kib("VmRSS")
    made = pack_rounded(parts, code)
    assert (kib("VmHWM") - before) * 1024 < made.num_bytes + (16 << 20)


def test_packing_leaves_torchs_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that pack use one each; threads that start later use torch's number."""
    found: list[int] = []
    encode_really = weights.encode

    def noted(weight: Tensor, fmt: WeightFormat) -> NarrowWeight:
        made = encode_really(weight, fmt)
        found.append(torch.get_num_threads())
        return made

    monkeypatch.setattr(weights, "encode", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pack(torch.randn(64, 65536), Code.INT8)
        later = Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [1, 1, 1, 1, 2]  # four parts of one tile
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
