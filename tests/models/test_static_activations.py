"""Checkpoints that have a scale of each layer's activations: these are rounded as the format does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.activations import with_activations
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.fused import linear as fused_linear
from kvant.models.fused.info import INFO as FUSED
from kvant.models.load import load_model
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.quantization import Activations
from kvant.models.select import choose
from kvant.weights import linear
from kvant.weights.format import FP8_TENSOR
from kvant.weights.linear import multiply, rounded_numbers
from tests.attention import driver
from tests.models import loading, tiny
from tests.models.tiny_narrow import INPUT_SCALE, build

GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
TEXT = [(7 * i + i * i) % 120 + 3 for i in range(80)]
DIALECTS = ["ct fp8 static", "ct fp8 static channel", "modelopt fp8", "fp8 static"]
STATIC = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)


def load(path: Path, only: ForwardInfo = MODULES, asked: Activations | None = None) -> LoadedModel:
    """On this CPU, as a GPU would load it; products decode their weights then."""
    geometry = tiny.geometry("llama")
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    config = json.loads((path / "config.json").read_text())
    facts = ForwardFacts(config, geometry, ComputeDtype.BFLOAT16, GPU)
    choice = with_activations(choose(only, facts), asked, facts)
    return load_model(path, plan, geometry, choice, device=torch.device("cpu"))


def logits(model: LoadedModel) -> Tensor:
    return loading.logits(model, TEXT)


def expected(numbers: dict[str, Tensor], scales: Callable[[str], float | None]) -> Tensor:
    """transformers' logits, with compressed-tensors' rounding in front of layers that have a scale."""
    model = LlamaForCausalLM(tiny.make("llama").config)
    model.load_state_dict(numbers)
    for name, part in model.named_modules():
        scale = scales(name) if name.endswith("_proj") else None
        if scale is not None:
            by = torch.tensor([scale])
            part.register_forward_pre_hook(
                lambda _, given, by=by: (
                    fake_quantize(given[0], by, torch.zeros(1), STATIC),
                    *given[1:],
                )
            )
    found: Tensor = model.train(False)(torch.tensor([TEXT])).logits[0].detach()
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_the_formats_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(64, 256) * torch.logspace(-4, 3, 256)).to(dtype)
    for scale in (torch.tensor([0.037]), torch.tensor([1.0]), torch.tensor([2.0**-7])):
        theirs = fake_quantize(x, scale, torch.zeros(1), STATIC)
        assert torch.equal(rounded_numbers(x, FP8_TENSOR, scale), theirs)


@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_prompt_is_rounded_by_the_scales_of_the_files(
    dialect: str, only: ForwardInfo, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect)
    found = logits(load(path, only))
    as_declared, exact = expected(numbers, lambda _: INPUT_SCALE), expected(numbers, lambda _: None)
    assert error(found, as_declared) < 0.2 * error(exact, as_declared)
    assert error(logits(load(path, only, Activations.EXACT)), exact) < 1e-5


@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
@pytest.mark.parametrize("asked", [Activations.FP8, Activations.FP8_FAST])
def test_the_choice_of_sums_reaches_every_product(
    asked: Activations, only: ForwardInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = build(tmp_path, DIALECTS[0])
    given = []

    def noted(*args: Any, **options: Any) -> Tensor:
        given.append(options["fast_sums"])
        return multiply(*args, **options)

    monkeypatch.setattr(linear, "multiply", noted)
    monkeypatch.setattr(fused_linear, "multiply", noted)
    logits(load(path, only, asked))
    assert given == [asked is Activations.FP8_FAST] * len(given) != []


@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
def test_layers_of_one_input_keep_scales_of_their_own(only: ForwardInfo, tmp_path: Path) -> None:
    path, numbers = build(tmp_path, "ct fp8 static channel")
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.input_scale"):
            tensor *= 8
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    wanted = expected(numbers, lambda name: INPUT_SCALE * (8 if name.endswith("k_proj") else 1))
    one_scale = expected(numbers, lambda _: INPUT_SCALE)
    assert error(logits(load(path, only)), wanted) < 0.5 * error(one_scale, wanted)


_UP = "model.layers.1.mlp.up_proj.input_scale"


def _break(path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _set(value: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[_UP]
        else:
            tensors[_UP] = value

    return change


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (torch.tensor(float("nan")), "NaN"),
        (torch.tensor(float("inf")), "infinite"),
        (torch.tensor(0.0), "zero or negative"),
        (torch.tensor(-1.0), "zero or negative"),
        (torch.ones(3), r"shape \[3\]"),
        (torch.tensor(1), "dtype I64"),
        (None, "missing"),
    ],
    ids=["nan", "inf", "zero", "negative", "shape", "dtype", "missing"],
)
def test_a_broken_scale_is_refused_by_name_with_a_way_out(
    value: Tensor | None, says: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, "ct fp8 static")
    _break(path, _set(value))
    with pytest.raises(BadCheckpoint, match=says) as refused:
        load(path)
    assert _UP in str(refused.value)
    way = refused.value.ways_out[0]
    assert way.arguments == ("--weight-activations", "exact")
    found = logits(load(path, asked=Activations.EXACT))
    assert error(found, expected(numbers, lambda _: None)) < 1e-5
