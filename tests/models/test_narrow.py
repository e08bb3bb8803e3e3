"""Weights that are rounded while they are loaded: the model of the decoded weights, in the planned bytes."""

from __future__ import annotations

import copy
import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CTRLConfig, GPT2Config, PreTrainedConfig

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, NotServable
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.cpu.info import INFO as COMPILED
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.fused.info import INFO as FUSED
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.narrow import NarrowConfig, chosen_layers
from kvant.models.quantization import Quantization, check_quantization
from kvant.models.select import select_forward
from kvant.models.weights import quantized_weight_bytes
from kvant.weights.codecs import decode, encode
from kvant.weights.format import INT8_CHANNEL
from kvant.weights.linear import NarrowLinear
from tests.attention import driver
from tests.models import loading, tiny

TEXT = [(7 * i + i * i) % 120 + 3 for i in range(45)]
GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def load(
    path: Path,
    family: str,
    quantization: Quantization | None,
    *,
    only: ForwardInfo = MODULES,
    **options: bool,
) -> LoadedModel:
    geometry = tiny.geometry(family)
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    return loading.load(path, plan, geometry, quantization=quantization, only=only, **options)


def logits(model: LoadedModel) -> Tensor:
    return loading.logits(model, TEXT)


def rounded(path: Path, quantization: Quantization) -> Tensor:
    """Logits of transformers' model with weights that were rounded and decoded."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        for name, fmt in chosen_layers(model, quantization).items():
            weight = model.get_submodule(name).weight
            weight.copy_(decode(encode(weight, fmt)))
        found: Tensor = model(torch.tensor([TEXT])).logits[0]
    return found


@pytest.mark.parametrize("quantization", Quantization, ids=lambda q: q.value)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
def test_a_rounded_model_is_the_model_of_the_decoded_weights_in_the_planned_bytes(
    only: ForwardInfo, family: str, quantization: Quantization, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path)
    model = load(path, family, quantization, only=only)
    expected, found = rounded(path, quantization), logits(model)
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
    planned = quantized_weight_bytes(
        json.loads((path / "config.json").read_text()), tiny.geometry(family), quantization,
        compute=ComputeDtype.FLOAT32,
    )  # fmt: skip
    buffers = sum(b.numel() * b.element_size() for b in model._module.buffers())
    assert planned.bytes == model.num_weight_bytes - buffers


@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.INT4])
@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
def test_a_tied_head_is_a_rounded_copy_of_the_embedding(
    only: ForwardInfo, quantization: Quantization, tmp_path: Path
) -> None:
    path = tiny.build("llama", tmp_path, tie_word_embeddings=True)
    model = load(path, "llama", quantization, only=only)
    module = model._module
    table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(module.model.embed_tokens.weight, table)
    assert torch.equal(decode(module.lm_head.narrow), decode(encode(table, INT8_CHANNEL)))
    expected, found = rounded(path, quantization), logits(model)
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
    planned = quantized_weight_bytes(
        json.loads((path / "config.json").read_text()), tiny.geometry("llama"), quantization,
        compute=ComputeDtype.FLOAT32,
    )  # fmt: skip
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    assert planned.bytes == model.num_weight_bytes - buffers
    made_up = load(path, "llama", quantization, only=only, dummy_weights=True)
    assert made_up.num_weight_bytes == model.num_weight_bytes


def test_layers_are_narrow_and_the_rest_is_wide(tmp_path: Path) -> None:
    model = load(tiny.build("llama", tmp_path), "llama", Quantization.FP8)._module
    layers = [part for part in model.model.layers.modules() if isinstance(part, nn.Linear)]
    assert not layers
    assert type(model.model.embed_tokens) is nn.Embedding
    narrow = [part for part in model.modules() if isinstance(part, NarrowLinear)]
    assert len(narrow) == 7 * model.config.num_hidden_layers + 1
    assert model.lm_head in narrow
    assert not hasattr(model, "hf_quantizer")
    assert getattr(model.config, "quantization_config", None) is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (CTRLConfig(n_embd=64, dff=96, n_layer=2, n_head=4, vocab_size=120), None),
        (GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=120), "have no linear layers"),
    ],
    ids=["ctrl", "gpt2"],
)  # fmt: skip
def test_layers_with_another_name_are_rounded_or_refused(
    config: PreTrainedConfig, says: str | None
) -> None:
    model = AutoModelForCausalLM.from_config(config)
    if says is None:
        found = chosen_layers(model, Quantization.INT8)
        assert len(found) == 2 * 6 + 1
        return
    told = NarrowConfig(Path("model"), asked=Quantization.INT8)
    with pytest.raises(NotServable, match=says) as refused:
        told.prepare(model)
    assert told.fault is refused.value  # transformers raises another error instead


def test_the_head_is_rounded_before_other_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide head is the largest matrix by far."""
    from kvant.models import narrow

    shapes: list[tuple[int, ...]] = []
    encode_really = narrow.encode_in_parts

    def noted(weight: Tensor, fmt: object) -> object:
        shapes.append(tuple(weight.shape))
        return encode_really(weight, fmt)  # type: ignore[arg-type]

    monkeypatch.setattr(narrow, "encode_in_parts", noted)
    load(tiny.build("llama", tmp_path), "llama", Quantization.FP8)
    assert shapes[0] == (tiny.VOCAB, 64)
    assert len(shapes) == 29


def test_dummy_weights_are_rounded_too(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    model = load(path, "llama", Quantization.INT4, dummy_weights=True)
    assert sum(isinstance(part, NarrowLinear) for part in model._module.modules()) > 0
    assert bool(logits(model).isfinite().all())


def test_at_most_one_matrix_is_wide_while_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the wide matrices that live whenever one is rounded."""
    from kvant.models import narrow

    path = tiny.build("llama", tmp_path)
    alive: list[int] = []
    shapes = {(64, 64), (32, 64), (96, 64), (64, 96)}
    encode_really = narrow.encode_in_parts

    def counted(weight: Tensor, fmt: object) -> object:
        gc.collect()
        wide = [
            one for one in gc.get_objects()
            if type(one) is Tensor and one.dtype is torch.float32 and one.device.type == "cpu"
            and tuple(one.shape) in shapes
        ]  # fmt: skip
        alive.append(len({one.data_ptr() for one in wide}))
        return encode_really(weight, fmt)  # type: ignore[arg-type]

    monkeypatch.setattr(narrow, "encode_in_parts", counted)
    gc.collect()
    gc.freeze()  # what lives already is neither searched nor counted
    try:
        load(path, "llama", Quantization.FP8)
    finally:
        gc.unfreeze()
    assert max(alive) <= 1


def test_a_weight_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.up_proj"):
        load(path, "llama", Quantization.FP8)


def test_a_norm_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((BadCheckpoint, NotServable)):  # by transformers, from some release on
        load(path, "llama", Quantization.INT8)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "granitemoe", "num_local_experts": 4}, "experts"),
        ({"model_type": "gpt2"}, "the matrices of 'gpt2' are transposed"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised already"),
    ],
)
def test_what_cannot_be_rounded_on_a_gpu_is_refused(config: dict[str, object], says: str) -> None:
    whole = {"model_type": "llama", **SIZES, **config}
    geometry = tiny.geometry("llama")
    facts = ForwardFacts(whole, geometry, ComputeDtype.BFLOAT16, GPU, Quantization.FP8)
    with pytest.raises(NotServable) as refused:
        select_forward(facts)
    assert says in str(refused.value)


def test_several_ranks_keep_no_room_for_a_head_that_they_do_not_round() -> None:
    geometry = replace(tiny.geometry("llama"), vocab_size=151_936)
    config = {"model_type": "llama", **SIZES}
    one, two = (
        ForwardFacts(
            config, geometry, ComputeDtype.BFLOAT16, GPU, Quantization.INT8, num_ranks=ranks
        ).scratch_bytes
        for ranks in (1, 2)
    )
    assert one == 2 * 64 * 151_936
    assert two == 2 * 64 * 2 * 96


def test_room_for_decoded_experts_is_kept_on_hopper_gpus() -> None:
    geometry = tiny.geometry("llama")
    config = {
        "model_type": "qwen3_moe", **SIZES, "num_experts": 32, "moe_intermediate_size": 256,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    }  # fmt: skip
    hopper = replace(GPU, arch="sm_90")
    facts = ForwardFacts(config, geometry, ComputeDtype.BFLOAT16, hopper)
    assert facts.stored is not None
    assert facts.scratch_bytes == 2 * 32 * 2 * 256 * 64
    few = 2 * 64 * 2 * 96
    assert replace(facts, device=replace(GPU, arch="sm_80")).scratch_bytes == few
    assert replace(facts, batch_invariant=True).scratch_bytes == few
    many = replace(facts, config=config | {"num_experts": 1 << 14})
    assert many.scratch_bytes == 2 << 27, "experts are decoded in parts"


def test_a_gpu_computes_in_16_bits_with_rounded_weights() -> None:
    check_quantization(Quantization.INT4, GPU, ComputeDtype.BFLOAT16)
    check_quantization(Quantization.INT4, GPU, ComputeDtype.FLOAT16)
    with pytest.raises(NotServable, match="16 bits"):
        check_quantization(Quantization.INT4, GPU, ComputeDtype.FLOAT32)


def test_only_the_forward_that_rounds_itself_gets_wide_weights() -> None:
    assert COMPILED.rounds_itself
    assert not MODULES.rounds_itself


def test_a_copied_config_still_tells_the_loader() -> None:
    made = NarrowConfig(Path("model"))
    assert copy.deepcopy({"quantization_config": made})["quantization_config"] is made
