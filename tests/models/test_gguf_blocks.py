"""GGUF checkpoints on a CPU keep their blocks: the dequantised model's numbers, in the file's bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, NotServable
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.measure.teacher_forced import text_logits
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.fused.info import INFO as FUSED
from kvant.models.geometry import read_geometry
from kvant.models.gguf_import import import_gguf
from kvant.models.load import load_model
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.quantization import Activations, Quantization
from kvant.models.select import choose
from kvant.models.stored import NotStored, Stored, read_stored
from kvant.plan.plan import PlanRequest
from kvant.plan.plan_json import plan_json
from kvant.plan.read_facts import keeps_blocks
from kvant.weights.blocks import read_blocks
from kvant.weights.codecs import decode
from kvant.weights.format import BLOCK_TYPES
from kvant.weights.linear import NarrowEmbedding, NarrowLinear
from tests.attention import driver
from tests.models import loading, tiny_gguf
from tests.models.tiny_gguf import metadata, tensors, write_gguf
from tests.weights.test_blocks import blocks

Type = gguf.GGMLQuantizationType
TEXT = [(7 * i + i * i) % 120 + 3 for i in range(45)]
BOUND = 3e-5
LARGE = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "ffn_gate": "Q4_K", "ffn_up": "Q4_K",
         "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_output": "Q4_1"}  # fmt: skip
SMALL = {
    "attn_q": "Q4_1",
    "attn_k": "Q8_0",
    "attn_v": "Q4_0",
    "ffn_up": "Q5_0",
    "token_embd": "Q4_0",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))


def write(path: Path, arch: str, chosen: dict[str, str], *, tied: bool = True) -> Path:
    """A small file whose matrices have the types in `chosen`, by a part of their names."""
    values, types = tensors(arch), {}
    if not tied:
        values["output.weight"] = values["token_embd.weight"][::-1].copy()
    for name, array in values.items():
        kind = next((kind for part, kind in chosen.items() if part in name), None)
        if array.ndim != 2 or kind is None:
            continue
        types[name] = Type[kind]
        if kind in ("Q4_K", "Q6_K"):
            made = blocks(BLOCK_TYPES[kind], *array.shape).copy()
            at = made.reshape(len(made), -1, BLOCK_TYPES[kind].num_bytes)
            places = (208,) if kind == "Q6_K" else (0, 2)
            for place in places:  # numbers of about 1, as the others
                scales = at[..., place : place + 2].copy().view(np.float16) / 500
                at[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
            values[name] = made
    return write_gguf(path, metadata(arch), values, arch, types)


def model_of(llm: LLM) -> LoadedModel:
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    return runner.model


def logits(llm: LLM) -> Tensor:
    return text_logits(model_of(llm), llm.plan, TEXT)


def open_(path: Path, **options: Any) -> LLM:
    return LLM(
        path, max_model_len=64, max_num_seqs=2, device="cpu", **{"dtype": "float32", **options}
    )


def transformers_logits(path: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(import_gguf(path), dtype=dtype)
    with torch.no_grad():
        found: Tensor = model(torch.tensor([TEXT])).logits[0]
    return found.float()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_the_dequantised_one_in_the_files_bytes(
    arch: str, tied: bool, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", arch, SMALL, tied=tied)
    llm, expected = open_(path), transformers_logits(path)
    model = model_of(llm)
    assert model.choice.name == "compiled"
    assert model.choice.stored is not None
    assert (logits(llm) - expected).abs().max() < BOUND * expected.abs().max()
    planned = llm.planned.weights_bytes or 0
    # Padded tiles, and a bias of zeros for every product.
    assert planned <= model.num_weight_bytes < 1.3 * planned


def load_as_on_a_gpu(path: Path, only: ForwardInfo) -> LoadedModel:
    """On this CPU, with the choices of a GPU; products decode their weights then."""
    directory = import_gguf(path, blocks=True)
    config = json.loads((directory / "config.json").read_text())
    geometry = read_geometry(config)
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    gpu = DeviceFacts(DeviceKind.CUDA, "sm_90")
    choice = choose(only, ForwardFacts(config, geometry, ComputeDtype.BFLOAT16, gpu))
    assert choice.stored is not None
    return load_model(directory, plan, geometry, choice, device=torch.device("cpu"))


@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gpu_keeps_the_files_bytes_too(only: ForwardInfo, tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen3", SMALL, tied=tied)
    expected, model = transformers_logits(path), load_as_on_a_gpu(path, only)
    found = loading.logits(model, TEXT)
    assert (found - expected).abs().max() < BOUND * expected.abs().max()
    kinds = {part.format for part in model._module.modules() if isinstance(part, NarrowLinear)}
    assert kinds == {BLOCK_TYPES[kind].format for kind in ("Q4_0", "Q4_1", "Q8_0")}
    assert isinstance(model._module.get_input_embeddings(), NarrowEmbedding)


def test_blocks_of_another_file_take_the_place_of_those_that_run(tmp_path: Path) -> None:
    """As `LLM.refit` does on a GPU, where products read joined blocks."""
    alike = {**SMALL, "attn_k": "Q4_1", "ffn_up": "Q8_0"}
    path = write(tmp_path / "m.gguf", "qwen3", alike)
    values = {name: value[::-1].copy() for name, value in tensors("qwen3").items()}
    types = {"token_embd": "Q4_0", "attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "Q4_0"}
    chosen = {
        name: Type[kind]
        for name in values
        for part, kind in types.items()
        if f"{part}.weight" in name
    }
    other = write_gguf(tmp_path / "o.gguf", metadata("qwen3"), values, "qwen3", chosen)

    def text(model: LoadedModel) -> Tensor:
        return loading.logits(model, TEXT)

    running, wanted = (load_as_on_a_gpu(where, FUSED) for where in (path, other))
    assert not torch.equal(text(running), text(wanted))
    running.refit(load_as_on_a_gpu(other, MODULES))
    assert torch.equal(text(running), text(wanted))


def test_a_gpu_keeps_blocks_in_16_bits_and_says_how_to_have_them(tmp_path: Path) -> None:
    config = {"gguf_types": {"model.layers.0.mlp.up_proj": "Q4_K"}}
    gpu = DeviceFacts(DeviceKind.CUDA, "sm_90")
    assert isinstance(read_stored(config, gpu, ComputeDtype.BFLOAT16), Stored)
    wide = read_stored(config, gpu, ComputeDtype.FLOAT32)
    assert isinstance(wide, NotStored)
    assert "--dtype bfloat16" in wide.reason
    other = read_stored(config, DeviceFacts(DeviceKind.ROCM), ComputeDtype.BFLOAT16)
    assert isinstance(other, NotStored)
    request = PlanRequest(str(tmp_path), gpu)
    assert keeps_blocks(request)
    assert not keeps_blocks(replace(request, quantization=Quantization.INT8))
    assert not keeps_blocks(replace(request, tensor_parallel_size=2))


def test_superblocks_of_mixed_types_are_the_dequantised_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_gguf, "HIDDEN", 256)
    monkeypatch.setattr(tiny_gguf, "INNER", 512)
    monkeypatch.setattr(tiny_gguf, "HEAD_DIM", 64)
    path = write(tmp_path / "m.gguf", "llama", LARGE)
    llm, expected = open_(path), transformers_logits(path)
    assert model_of(llm).choice.name == "compiled"
    assert (logits(llm) - expected).abs().max() < BOUND * expected.abs().max()
    said = str(llm.planned.target.narrow)
    assert "Q4_K (8)" in said
    assert "Q6_K (5)" in said


def test_the_plan_names_types_that_are_kept_and_that_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", SMALL)
    said = str(open_(path).planned.target.narrow)
    assert "Q4_1 (2)" in said
    assert "imported as float32: Q5_0 (2)" in said


def test_kept_blocks_are_the_files_numbers_in_transformers_order(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", SMALL)
    kept, wide = import_gguf(path, blocks=True), import_gguf(path)
    types = json.loads((kept / "config.json").read_text())["gguf_types"]
    narrow, numbers = (load_file(where / "model.safetensors") for where in (kept, wide))
    assert narrow.keys() == numbers.keys()
    for name, tensor in narrow.items():
        kind = BLOCK_TYPES.get(types.get(name.removesuffix(".weight")))
        if kind is not None:
            assert tensor.dtype is torch.uint8
            tensor = decode(read_blocks(kind, tensor, numbers[name].shape[1]))
        assert torch.equal(tensor, numbers[name]), name


def test_another_dtype_decodes_the_blocks_while_they_are_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", SMALL)
    llm, expected = open_(path, dtype="bfloat16"), transformers_logits(path, torch.bfloat16)
    assert model_of(llm).choice.stored is None
    assert "decoded while they are loaded" in str(llm.planned.target.narrow)
    assert (logits(llm) - expected).abs().max() < 0.05 * expected.abs().max()


def test_rounding_by_name_rounds_the_numbers_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", SMALL)
    rounded, same = (open_(where, quantization="int8") for where in (path, import_gguf(path)))
    assert torch.equal(logits(rounded), logits(same))
    assert model_of(rounded).choice.stored is None


def test_a_scale_that_is_no_number_is_refused_by_name_before_loading(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", SMALL)
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.attn_q.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = np.array([np.nan], np.float16).tobytes()
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"m\.gguf") as caught:
        open_(path)
    assert "blk.1.attn_q.weight" in caught.value.why
    assert "scale" in caught.value.why
    assert not list((tmp_path / "cache" / "gguf").glob("[!.]*[!n]"))  # nothing but a plan's files


def test_rounded_activations_are_asked_for_by_name_and_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", SMALL)
    exact, rounded = open_(path), open_(path, weight_activations="int8")
    assert rounded.planned.forward.activations is Activations.INT8
    assert exact.planned.forward.activations is None
    found, expected = logits(rounded), logits(exact)
    error = float((found - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.2
    assert plan_json(rounded.planned)["weight_activations"] == "int8"


@pytest.mark.parametrize(
    ("options", "says"),
    [({}, "weights are not quantised"), ({"quantization": "int8", "dtype": "bfloat16"}, "float32")],
)
def test_rounded_activations_without_a_product_that_rounds_are_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = import_gguf(write(tmp_path / "m.gguf", "llama", SMALL))  # numbers
    with pytest.raises(NotServable, match=says) as refused:
        open_(path, weight_activations="int8", **options)
    assert refused.value.ways_out
    open_(path, weight_activations="int8", quantization="int8")
