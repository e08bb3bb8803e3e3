"""Experts in narrow formats, rounded or as stored: the model of the decoded weights, in the planned bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.forward_info import ForwardInfo
from kvant.models.fused.info import INFO as FUSED
from kvant.models.fused.narrow_experts import NarrowExperts
from kvant.models.load import load_model
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.quantization import Quantization
from kvant.models.stored import NotStored, Stored, read_stored
from kvant.models.weights import quantized_weight_bytes
from kvant.plan.plan import PlanRequest
from kvant.weights.codecs import decode, encode, encode_stack
from kvant.weights.format import FP8_BLOCK
from tests.attention import driver
from tests.models import families, loading, tiny
from tests.models.loading import CPU_FACTS
from tests.models.tiny_narrow import DIALECTS
from tests.models.tiny_narrow_experts import SIZES, build, build_mxfp4, change, round_weights, wide
from tests.planned import plan_of

GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
TEXT = [(7 * i + i * i) % 120 + 3 for i in range(45)]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "mixtral": {"intermediate_size": 96},
    "gpt_oss": {"intermediate_size": 96},
}


def logits(model: LoadedModel) -> Tensor:
    return loading.logits(model, TEXT)


def rounded(path: Path, quantization: Quantization) -> Tensor:
    """Logits of transformers' model with weights that were rounded and decoded."""
    model = AutoModelForCausalLM.from_pretrained(path)
    round_weights(model, quantization)
    with torch.no_grad():
        found: Tensor = model(torch.tensor([TEXT])).logits[0]
    return found


@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
def test_rounded_experts_are_those_of_the_decoded_weights_in_the_planned_bytes(
    only: ForwardInfo, family: str, quantization: Quantization, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path, **FAMILIES[family])
    geometry = tiny.geometry(family, **FAMILIES[family])
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    model = loading.load(path, plan, geometry, quantization=quantization, only=only)
    expected, found = rounded(path, quantization), logits(model)
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
    planned = quantized_weight_bytes(
        json.loads((path / "config.json").read_text()), geometry, quantization,
        compute=ComputeDtype.FLOAT32,
    )  # fmt: skip
    buffers = sum(b.numel() * b.element_size() for b in model._module.buffers())
    assert planned.bytes == model.num_weight_bytes - buffers


def load_stored(
    path: Path, family: str, only: ForwardInfo = FUSED, *, dummy: bool = False
) -> LoadedModel:
    """On this CPU, as a GPU would load it; products decode their weights then."""
    geometry = tiny.geometry(family, **SIZES[family])
    return loading.load_as_on_gpu(path, geometry, only, dummy_weights=dummy)


def _wide_logits(path: Path, family: str) -> Tensor:
    geometry = tiny.geometry(family, **SIZES[family])
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    return logits(loading.load(path, plan, geometry, only=FUSED))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dialect", ["fp8 block", "ct fp8 tensor", "ct fp8 channel", "ct int4",
                                     "ct int4 zero points", "gptq", "awq"])  # fmt: skip
def test_stored_experts_compute_what_their_numbers_do(
    dialect: str, family: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect, family)
    expected = _wide_logits(wide(path, numbers, tmp_path / "wide"), family)
    for only in (MODULES, FUSED):
        model = load_stored(path, family, only)
        found = logits(model)
        assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
        assert not model.unused_tensors
    held = [part for part in model._module.modules() if isinstance(part, NarrowExperts)]
    assert len(held) == len(tiny.geometry(family).layers)


@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
def test_mxfp4_experts_compute_what_their_numbers_do(only: ForwardInfo, tmp_path: Path) -> None:
    path, numbers = build_mxfp4(tmp_path)
    expected = _wide_logits(wide(path, numbers, tmp_path / "wide"), "gpt_oss")
    model = load_stored(path, "gpt_oss", only)
    found = logits(model)
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
    for name, part in model._module.named_modules():
        if isinstance(part, NarrowExperts):
            exact = numbers[f"{name}.gate_up_proj"].transpose(1, 2)
            assert torch.equal(decode(part.gate_up.one(2)), exact[2])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_experts_that_do_not_run_as_stored_are_decoded_to_the_same_numbers(
    dialect: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect)
    for device in (CPU_FACTS, GPU):
        assert plan_of(PlanRequest(str(path), device)).can_run
    found = plan_of(PlanRequest(str(path), CPU_FACTS))
    assert found.forward.stored is None
    assert str(found.target.narrow).startswith("decoded while they are loaded: ")
    module = load_model(
        path, found.target.kv, found.target.geometry, found.forward, device=torch.device("cpu")
    )._module
    for name, weight in module.named_parameters():
        expected = numbers.get(name)
        if name.endswith("experts.gate_up_proj"):
            expected = torch.cat([_stacked(numbers, name, one) for one in _GATED], 1)
        elif name.endswith("experts.down_proj"):
            expected = _stacked(numbers, name, "down_proj")
        assert expected is not None
        assert torch.equal(weight, expected), name


_GATED = ("gate_proj", "up_proj")


def _stacked(numbers: dict[str, Tensor], name: str, product: str) -> Tensor:
    experts = name.rpartition(".")[0]
    return torch.stack([numbers[f"{experts}.{index}.{product}.weight"] for index in range(4)])


@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "gate_up_proj.weight_scale"])
def test_codes_of_joined_experts_are_refused_by_plan_and_start(name: str, tmp_path: Path) -> None:
    path, _ = build(tmp_path, "fp8 block")

    def join(tensors: dict[str, Tensor]) -> None:
        at = "model.layers.1.mlp.experts"
        for short, joined in (("weight", "gate_up_proj"), ("weight_scale_inv", name)):
            apart = [
                torch.cat([tensors.pop(f"{at}.{index}.{one}.{short}") for one in _GATED])
                for index in range(4)
            ]
            tensors[f"{at}.{joined}"] = torch.stack(apart)

    planned = plan_of(PlanRequest(str(change(path, join)), CPU_FACTS))
    assert not planned.can_run
    says = r"1\.mlp\.experts\.gate_up_proj has the dtype F8_E4M3"
    with pytest.raises(BadCheckpoint, match=says) as refused:
        LLM(path, kv_cache_memory="1MiB")
    assert refused.value.ways_out


@pytest.mark.parametrize(
    "left",
    [r"\d\.gate_proj", r"\d\.up_proj", r"\d\.(gate|up)_proj", r"\d\.down_proj", r"0\..*", r"1\..*"],
)
def test_layers_with_some_wide_experts_are_refused_by_plan_and_load(
    left: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, "ct fp8 channel")
    pattern = rf".*layers\.1\.mlp\.experts\.{left}"

    def widen(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if re.match(pattern, name)]:
            del tensors[name]
            if name in numbers:
                tensors[name] = numbers[name]

    config = json.loads((change(path, widen) / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", f"re:{pattern}"]
    (path / "config.json").write_text(json.dumps(config))
    for device, dtype in ((CPU_FACTS, None), (GPU, ComputeDtype.BFLOAT16)):
        planned = plan_of(PlanRequest(str(path), device, dtype=dtype))
        assert not planned.can_run
        with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.experts\.\d\..* cannot be used"):
            planned.check_files()
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp\.experts\.\d\..* cannot be used"):
        load_stored(path, "qwen3_moe")


@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_model_without_shared_experts_is_rounded(
    only: ForwardInfo, quantization: Quantization, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "n_shared_experts": 0}
    families.build("dots1", tmp_path, **sizes)
    found = plan_of(
        PlanRequest(str(tmp_path), GPU, quantization=quantization, dtype=ComputeDtype.BFLOAT16)
    )
    assert found.can_run
    geometry = found.target.geometry
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    model = loading.load(tmp_path, plan, geometry, quantization=quantization, only=only)
    expected = rounded(tmp_path, quantization)
    assert (logits(model) - expected).abs().max() < 3e-5 * expected.abs().max()


def _missing(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.gate_up_proj_scales"]


def _truncated(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][:, :-1]


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.gate_up_proj_scales"][0, 3, 1] = 255


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_missing, r"layers\.1\.mlp\.experts\.gate_up_proj_scales is missing"),
        (_truncated, r"layers\.1\.mlp\.experts\.down_proj_blocks has the shape"),
        (_nan, r"layers\.1\.mlp\.experts\.gate_up_proj_scales holds NaN"),
    ],
)
def test_broken_experts_are_refused_by_the_tensors_name(
    spoil: Any, says: str, tmp_path: Path
) -> None:
    path, _ = build_mxfp4(tmp_path)
    with pytest.raises(BadCheckpoint, match=says):
        load_stored(change(path, spoil), "gpt_oss")


def test_a_broken_scale_of_one_expert_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "fp8 block")

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.2.mlp.experts.3.up_proj.weight_scale_inv"].zero_()

    with pytest.raises(BadCheckpoint, match=r"2\.mlp\.experts\.3\.up_proj\.weight_scale_inv"):
        load_stored(change(path, spoil), "qwen3_moe")


def test_dummy_experts_have_the_bytes_of_stored_ones(tmp_path: Path) -> None:
    path, _ = build_mxfp4(tmp_path)
    read, made = (load_stored(path, "gpt_oss", dummy=dummy) for dummy in (False, True))
    assert read.num_weight_bytes == made.num_weight_bytes
    assert bool(logits(made).isfinite().all())


def test_experts_that_end_inside_a_block_are_decoded() -> None:
    config = {
        "model_type": "qwen3_moe", "num_experts": 4, "hidden_size": 128, "moe_intermediate_size": 96,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    found = read_stored(config, GPU)
    assert isinstance(found, NotStored)
    assert "blocks" in found.reason
    config["moe_intermediate_size"] = 256
    assert isinstance(read_stored(config, GPU), Stored)


def test_a_stack_is_its_weights() -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 256, 128)
    stack = encode_stack(weights, FP8_BLOCK)
    for index, weight in enumerate(weights):
        assert torch.equal(decode(stack.one(index)), decode(encode(weight, FP8_BLOCK)))
