"""Families of latents with experts, such as DeepSeek's: narrow weights run as they are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.forward_info import ForwardFacts
from kvant.models.fused.info import INFO as FUSED
from kvant.models.fused.narrow_experts import NarrowExperts, is_experts
from kvant.models.load import load_model
from kvant.models.narrow import chosen_layers
from kvant.models.quantization import Quantization
from kvant.models.read_shape import read_shape
from kvant.models.select import choose
from kvant.weights.codecs import decode, encode
from kvant.weights.format import FP8_CHANNEL
from kvant.weights.linear import NarrowLinear
from tests.attention import driver
from tests.models import families, loading
from tests.models.tiny_narrow import DIALECTS

GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
TEXT = list(families.PROMPTS[-1])


def build(directory: Path, family: str, dialect: str) -> tuple[Path, Path]:
    """A model whose linear layers are narrow, and the same one with their numbers."""
    narrow, wide = directory / "narrow", directory / "wide"
    families.build(family, wide)
    families.build(family, narrow)
    declared, make = DIALECTS[dialect]
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, value in load_file(wide / "model.safetensors").items():
        stored[name] = numbers[name] = value
        if value.dim() == 2 and "layers." in name and ".gate.weight" not in name:
            del stored[name]
            layer = name.removesuffix(".weight")
            tensors, numbers[name] = make(value, generator)
            stored |= {f"{layer}.{short}": tensor for short, tensor in tensors.items()}
    for path, tensors in ((narrow, stored), (wide, numbers)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "quantization_config": declared}))
    return narrow, wide


def logits(model: Any) -> Tensor:
    return loading.logits(model, TEXT)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("dialect", ["ct fp8 channel"])
def test_stored_weights_compute_what_their_numbers_do(
    dialect: str, family: str, tmp_path: Path
) -> None:
    narrow, wide = build(tmp_path, family, dialect)
    config = json.loads((narrow / "config.json").read_text())
    geometry = read_shape(config).geometry
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    facts = ForwardFacts(config, geometry, ComputeDtype.BFLOAT16, GPU)
    assert facts.stored is not None
    assert FUSED.refuse(facts) is None
    model = load_model(narrow, plan, geometry, choose(FUSED, facts), device=torch.device("cpu"))
    assert any(isinstance(part, NarrowExperts) for part in model._module.modules())
    assert any(isinstance(part, NarrowLinear) for part in model._module.modules())
    expected = logits(loading.load(wide, plan, geometry, only=FUSED))
    found = logits(model)
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
    assert not model.unused_tensors


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_rounded_experts_are_those_of_the_decoded_weights(family: str, tmp_path: Path) -> None:
    families.build(family, tmp_path / "model")
    path = tmp_path / "model"
    geometry = read_shape(json.loads((path / "config.json").read_text())).geometry
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    asked = Quantization.FP8
    found = logits(loading.load(path, plan, geometry, quantization=asked, only=FUSED))
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        for name, fmt in chosen_layers(model, asked).items():
            weight = model.get_submodule(name).weight
            weight.copy_(decode(encode(weight, fmt)))
        for part in model.modules():
            for name in ("gate_up_proj", "down_proj") if is_experts(part) else ():
                for weight in getattr(part, name):
                    weight.copy_(decode(encode(weight, FP8_CHANNEL)))
        expected = model(torch.tensor([TEXT])).logits[0]
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
