"""Families whose files hold each expert by itself: read as stored on a GPU, decoded on a CPU, or rounded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.kv.dtype import ComputeDtype
from kvant.models.file_names import FileNames
from kvant.models.fused.info import INFO as FUSED
from kvant.models.fused.narrow_experts import NarrowExperts
from kvant.models.load import load_model
from kvant.models.loaded import LoadedModel
from kvant.models.quantization import Quantization, format_of
from kvant.models.stored import _EXPERTS_APART, _ROUNDED, names_in_files
from kvant.models.weights import weights_in_files
from kvant.plan.plan import Plan, PlanRequest
from kvant.sampling.sampling_params import SamplingParams
from kvant.weights.codecs import decode, encode
from kvant.weights.linear import NarrowLinear
from tests.models import families, loading
from tests.models.loading import CPU_FACTS
from tests.models.tiny_narrow_experts import build_family, build_nested, change
from tests.planned import plan_of

GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
QUICK = ("deepseek_v3", "hy_v3", "minimax_m2", "qwen3_next")
EACH = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in sorted(_ROUNDED - {"gpt_oss"})
]
BLOCKS = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
TEXT = [(7 * i + i * i) % 90 + 3 for i in range(40)]


def logits(model: LoadedModel) -> Tensor:
    return loading.logits(model, TEXT)


def names_of(family: str) -> FileNames:
    text = {"model_type": f"{family}_text", "num_experts": 4, "moe_intermediate_size": 128}
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return names_in_files(
        {"model_type": family, "text_config": {**text, "hidden_size": 128},
         "quantization_config": declared}
    )  # fmt: skip


def experts_of(module: torch.nn.Module) -> dict[str, NarrowExperts]:
    return {name: part for name, part in module.named_modules() if isinstance(part, NarrowExperts)}


def linear_of(module: torch.nn.Module) -> Iterator[tuple[str, NarrowLinear]]:
    for name, part in module.named_modules():
        if isinstance(part, NarrowLinear):
            yield name, part


@pytest.mark.parametrize("family", EACH)
def test_a_gpu_keeps_their_codes_and_a_cpu_answers_with_their_numbers(
    family: str, tmp_path: Path
) -> None:
    path, exact = build_family(tmp_path, family)
    planned = plan_of(PlanRequest(str(path), GPU, dtype=ComputeDtype.BFLOAT16))
    assert planned.can_run
    assert planned.forward.stored is not None
    geometry = planned.target.geometry
    model = loading.load_as_on_gpu(path, geometry, FUSED)
    wide = loading.load_as_on_gpu(exact, geometry, FUSED, is_narrow=False)
    assert not model.unused_tensors
    assert torch.equal(logits(model), logits(wide))
    numbers = load_file(exact / "model.safetensors")
    names, held = _EXPERTS_APART[family], experts_of(model._module)
    assert held
    for name, part in held.items():
        for index in range(part.num_experts):
            of = [
                numbers[f"{names.matrix(name, index, one)}.weight"]
                for one in (names.gate, names.up, names.down)
            ]
            assert torch.equal(decode(part.gate_up.one(index)), torch.cat(of[:2]))
            assert torch.equal(decode(part.down.one(index)), of[2])
    linear = dict(linear_of(model._module))
    for name, layer in linear.items():
        assert torch.equal(decode(layer.narrow), numbers[f"{names.in_files(name)}.weight"]), name
    stored = load_file(path / "model.safetensors").items()
    apart = [one for one, value in stored if value.itemsize == 1 and ".experts." not in one]
    assert len(apart) == len(linear)
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    found, expected = (
        LLM(one, kv_cache_memory="1MiB").generate([TEXT], SamplingParams(**greedy))[0].token_ids
        for one in (path, exact)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("family", "dialect", "sizes"),
    [
        ("qwen3_5", "ct fp8 channel", {}),
        ("qwen3_5_moe", "ct fp8 channel", {}),
        ("qwen3_5_moe", "fp8 block", BLOCKS),
        ("qwen3_vl", "ct fp8 channel", {}),
        ("qwen3_vl_moe", "ct fp8 channel", {}),
        ("qwen3_vl_moe", "fp8 block", BLOCKS),
    ],
)
def test_decoders_beside_a_vision_encoder_keep_their_codes(
    family: str, dialect: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    path, exact, numbers = build_nested(tmp_path, family, dialect, **sizes)
    planned = plan_of(PlanRequest(str(path), GPU, dtype=ComputeDtype.BFLOAT16))
    assert planned.forward.stored is not None
    assert planned.audit is not None
    planned.audit.check()
    geometry, names = planned.target.geometry, planned.forward.stored.names
    model = loading.load_as_on_gpu(path, geometry, FUSED)
    wide = loading.load_as_on_gpu(exact, geometry, FUSED, is_narrow=False)
    assert not model.unused_tensors
    expected = logits(wide)
    assert (logits(model) - expected).abs().max() < 3e-5 * expected.abs().max()
    held = experts_of(model._module)
    linear = dict(linear_of(model._module))
    assert len(linear) + 3 * sum(one.num_experts for one in held.values()) == len(numbers)
    for name, layer in linear.items():
        assert torch.equal(decode(layer.narrow), numbers[f"{names.in_files(name)}.weight"]), name
    for name, part in held.items():
        for index in range(part.num_experts):
            gate, up, down = (
                numbers[f"{names.matrix(name, index, one)}.weight"]
                for one in (names.gate, names.up, names.down)
            )
            assert torch.equal(decode(part.gate_up.one(index)), torch.cat((gate, up)))
            assert torch.equal(decode(part.down.one(index)), down)
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    tokens = {
        LLM(one, kv_cache_memory="1MiB").generate([TEXT], SamplingParams(**greedy))[0].token_ids
        for one in (path, exact)
    }
    assert len(tokens) == 1


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_a_plan_counts_bytes_beside_a_vision_encoder_without_files(
    family: str, tmp_path: Path
) -> None:
    path, _, _ = build_nested(tmp_path, family, "fp8 block", **BLOCKS)
    stored = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    found = plan_of(PlanRequest(str(path), GPU, dtype=ComputeDtype.BFLOAT16)).target.weights
    counted = sum(
        one.numel() * (1 if one.itemsize == 1 else 4 if "scale" in name else 2)
        for name, one in stored.items()
        if family != "qwen3_5_moe" or "visual" not in name  # its class has no encoder
    )
    assert found.bytes == counted


def test_a_plan_counts_a_decoder_alike_alone_and_beside_a_vision_encoder(tmp_path: Path) -> None:
    path, _, _ = build_nested(tmp_path, "qwen3_5_moe")
    (path / "model.safetensors").unlink()
    said = (path / "config.json").read_text()
    alone = json.loads(said.replace("model.language_model.", "model."))
    (tmp_path / "alone").mkdir()
    config = {**alone["text_config"], "quantization_config": alone["quantization_config"]}
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config))
    for ranks in (1, 2):
        counted = {
            plan_of(
                PlanRequest(str(one), GPU, dtype=ComputeDtype.BFLOAT16, tensor_parallel_size=ranks)
            ).target.weights.bytes
            for one in (path, tmp_path / "alone")
        }
        assert len(counted) == 1


def test_a_plan_leaves_out_codes_of_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    path, _, _ = build_nested(tmp_path, "qwen3_5_moe")
    request = PlanRequest(str(path), GPU, dtype=ComputeDtype.BFLOAT16)
    expected = plan_of(request).target.weights.bytes

    def add(tensors: dict[str, Tensor]) -> None:
        at = "model.language_model.layers.3"
        for name in [one for one in tensors if one.startswith(at)]:
            tensors[name.replace(at, "mtp.layers.0")] = tensors[name].clone()

    change(path, add)
    assert plan_of(request).target.weights.bytes == expected


def plan_with(path: Path, wide: dict[str, Tensor], part: str) -> Plan:
    """Replace the tensors whose names have this part by wide ones; return the plan, which reads them all."""

    def widen(tensors: dict[str, Tensor]) -> None:
        for name in [one for one in tensors if part in one]:
            del tensors[name]
        tensors |= {name: one for name, one in wide.items() if part in name}

    planned = plan_of(PlanRequest(str(change(path, widen)), GPU, dtype=ComputeDtype.BFLOAT16))
    assert planned.audit is not None
    planned.audit.check()
    return planned


def test_wide_experts_in_one_tensor_stay_wide_beside_narrow_layers(tmp_path: Path) -> None:
    path, exact, _ = build_nested(tmp_path, "qwen3_vl_moe")
    stacks = load_file(exact / "model.safetensors")

    planned = plan_with(path, stacks, ".experts.")
    model = loading.load_as_on_gpu(path, planned.target.geometry, FUSED)
    wide = loading.load_as_on_gpu(exact, planned.target.geometry, FUSED, is_narrow=False)
    expected = logits(wide)
    assert (logits(model) - expected).abs().max() < 3e-5 * expected.abs().max()
    assert dict(linear_of(model._module))
    assert not experts_of(model._module)


@pytest.mark.parametrize("dialect", ["ct fp8 channel", "fp8 block"])
def test_a_cpu_plans_decoded_experts_beside_latents_as_it_runs_them(
    dialect: str, tmp_path: Path
) -> None:
    path, exact = build_family(
        tmp_path, "deepseek_v3", dialect, hidden_size=128, moe_intermediate_size=128
    )
    planned, wide = (plan_of(PlanRequest(str(one), CPU_FACTS)) for one in (path, exact))
    assert planned.forward.name == wide.forward.name == "fused"
    assert planned.forward.stored is None
    assert (planned.target.narrow or "").startswith("decoded while they are loaded: ")
    assert planned.target.weights.bytes == wide.target.weights.bytes
    model = load_model(
        path, planned.target.kv, planned.target.geometry, planned.forward, device=loading.CPU
    )
    of_numbers = loading.load(exact, wide.target.kv, wide.target.geometry)
    assert model.num_weight_bytes == of_numbers.num_weight_bytes
    assert torch.equal(logits(model), logits(of_numbers))


@pytest.mark.parametrize("family", ["minimax_m2", "ernie4_5_moe", "hy_v3"])
def test_a_plan_counts_their_bytes_without_files(family: str, tmp_path: Path) -> None:
    path, _ = build_family(tmp_path, family)
    file = path / "model.safetensors"
    stored = load_file(file)
    file.unlink()
    found = plan_of(PlanRequest(str(path), GPU, dtype=ComputeDtype.BFLOAT16)).target.weights
    of_codes = {torch.float8_e4m3fn: 1}  # other numbers, scales too, have 16 bits in released files
    counted = sum(of_codes.get(one.dtype, 2) * one.numel() for one in stored.values())
    assert found.bytes == pytest.approx(counted, rel=2e-4)  # without buffers of routers


@pytest.mark.parametrize("family", EACH)
def test_they_are_rounded_while_they_are_loaded(family: str, tmp_path: Path) -> None:
    families.build(family, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    asked = Quantization.INT8
    plan_of(PlanRequest(str(tmp_path), GPU, dtype=ComputeDtype.BFLOAT16, quantization=asked))
    target = plan_of(PlanRequest(str(tmp_path), CPU_FACTS)).target
    module = loading.load(
        tmp_path, target.kv, target.geometry, quantization=asked, only=FUSED
    )._module

    def rounded(weight: Tensor, *, is_head: bool = False) -> Tensor:
        return decode(encode(weight, format_of(asked, weight.shape[1], is_head=is_head)))

    held = experts_of(module)
    assert held
    for name, part in held.items():
        wide: Any = theirs.get_submodule(name)
        for index in range(part.num_experts):
            both = ((part.gate_up, wide.gate_up_proj), (part.down, wide.down_proj))
            for narrow, stack in both:
                assert torch.equal(decode(narrow.one(index)), rounded(stack[index]))
    for name, layer in linear_of(module):
        weight: Any = theirs.get_submodule(name).weight
        assert torch.equal(decode(layer.narrow), rounded(weight, is_head="head" in name)), name


def test_a_cpu_runs_decoded_recurrent_layers_as_it_runs_wide_ones(tmp_path: Path) -> None:
    path, exact = build_family(tmp_path, "qwen3_5_text", "ct int4")
    narrow, wide = (plan_of(PlanRequest(str(one), CPU_FACTS)) for one in (path, exact))
    assert narrow.forward.name == wide.forward.name
    assert narrow.target.weights.bytes == wide.target.weights.bytes
    models = (
        load_model(one, plan.target.kv, plan.target.geometry, plan.forward, device=loading.CPU)
        for one, plan in ((path, narrow), (exact, wide))
    )
    found, expected = map(logits, models)
    assert torch.equal(found, expected)


def test_layers_beside_experts_are_declared_by_their_names_in_files(tmp_path: Path) -> None:
    path, exact = build_family(tmp_path, "hy_v3")
    numbers = load_file(exact / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"].append("re:.*shared_mlp.*")
    (path / "config.json").write_text(json.dumps(config))

    planned = plan_with(path, numbers, "shared_mlp")
    target = planned.target
    geometry, names = target.geometry, _EXPERTS_APART["hy_v3"]
    assert target.parameters
    listed = weights_in_files(target.config, geometry, target.parameters, names)
    assert not isinstance(listed, str)
    beside = {f"{one.name}.weight" for one in listed if "shared" in one.name}
    assert beside == {name for name in numbers if "shared_mlp" in name}
    model = loading.load_as_on_gpu(path, geometry, FUSED)
    wide = loading.load_as_on_gpu(exact, geometry, FUSED, is_narrow=False)
    assert torch.equal(logits(model), logits(wide))
    linear = dict(linear_of(model._module))
    assert linear
    assert not any("shared" in name for name in linear)


@pytest.mark.parametrize(("short", "what"), [("weight_scale", "missing"), ("weight", "shape")])
def test_layers_beside_experts_are_refused_by_their_names_in_files(
    short: str, what: str, tmp_path: Path
) -> None:
    path, _ = build_family(tmp_path, "hy_v3")
    name = f"model.layers.2.mlp.shared_mlp.up_proj.{short}"

    def damage(tensors: dict[str, Tensor]) -> None:
        first = tensors.pop(name)[1:]
        if what == "shape":
            tensors[name] = first

    planned = plan_of(PlanRequest(str(change(path, damage)), GPU, dtype=ComputeDtype.BFLOAT16))
    assert planned.audit is not None
    with pytest.raises(BadCheckpoint, match=f"{name} .*{what}"):
        planned.audit.check()
    with pytest.raises(BadCheckpoint, match=f"{name} .*{what}"):
        loading.load_as_on_gpu(path, planned.target.geometry, FUSED)


def test_names_in_files_follow_from_the_module() -> None:
    at = "model.layers.3.mlp.experts"
    assert FileNames().matrix(at, 2, "up_proj") == f"{at}.2.up_proj"
    mixtral = _EXPERTS_APART["mixtral"]
    found = mixtral.matrix(at, 2, mixtral.down)
    assert found == "model.layers.3.block_sparse_moe.experts.2.w2"
    assert mixtral.of_product("gate_up_proj") == ("w1", "w3")
    hunyuan, module = _EXPERTS_APART["hy_v3"], "model.layers.3.mlp.shared_experts.up_proj"
    stored = hunyuan.in_files(module)
    assert stored == hunyuan.in_files(stored) == "model.layers.3.mlp.shared_mlp.up_proj"
    assert hunyuan.of_module(stored) == hunyuan.of_module(module) == module
    qwen, place = names_of("qwen3_5_moe"), "model.language_model.layers.3.mlp.experts"
    assert qwen.matrix(at, 2, "up_proj") == qwen.matrix(place, 2, "up_proj") == f"{place}.2.up_proj"
    assert qwen.of_module(place) == qwen.of_module(at) == at
    assert qwen.in_files("lm_head") == qwen.of_module("lm_head") == "lm_head"
    assert mixtral.in_files(module) == mixtral.of_module(module) == module
