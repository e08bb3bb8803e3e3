"""Ranks hold their parts of weights that a checkpoint stores in narrow formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import ModelGeometry
from kvant.models.forward_info import ForwardInfo
from kvant.models.fused.info import INFO as FUSED
from kvant.models.fused.narrow_experts import NarrowExperts
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.quantization import Quantization
from kvant.plan.plan import PlanRequest
from kvant.weights.codecs import NarrowStack, decode
from kvant.weights.linear import NarrowLinear
from tests.models import loading, tiny, tiny_narrow_experts
from tests.models.tiny_narrow import DIALECTS, build
from tests.parallel.together import ThreadGroup, by_all
from tests.planned import plan_of

GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
TEXT = [(7 * i + i * i) % 120 + 3 for i in range(45)]


def load(
    path: Path,
    only: ForwardInfo,
    group: ThreadGroup | None = None,
    quantization: Quantization | None = None,
    family: str | ModelGeometry = "llama",
    **sizes: Any,
) -> LoadedModel:
    """On this CPU, as a GPU would load it."""
    geometry = family if isinstance(family, ModelGeometry) else tiny.geometry(family, **sizes)
    return loading.load_as_on_gpu(path, geometry, only, group=group, quantization=quantization)


def logits(model: LoadedModel) -> Tensor:
    return loading.logits(model, TEXT)


@pytest.mark.parametrize("dialect", [one for one in DIALECTS if "reordered" not in one])
def test_ranks_compute_what_one_device_does(dialect: str, tmp_path: Path) -> None:
    path, numbers = build(tmp_path, dialect, intermediate_size=128)
    only = MODULES if dialect in ("awq", "ct int8") else FUSED
    expected = logits(load(path, only))

    def rank(group: ThreadGroup) -> tuple[LoadedModel, Tensor]:
        model = load(path, only, group)
        return model, logits(model)

    ranks = by_all(2, rank)
    for number, (model, found) in enumerate(ranks):
        assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
        narrow = {n: p for n, p in model._module.named_modules() if isinstance(p, NarrowLinear)}
        assert len(narrow) == 7 * 4
        for name, part in narrow.items():
            whole = numbers[f"{name}.weight"]
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            assert torch.equal(decode(part.narrow), whole.chunk(2, dim)[number]), name


@pytest.mark.parametrize("asked", [Quantization.FP8, Quantization.INT8, Quantization.INT4])
def test_each_rank_rounds_its_part_while_it_is_loaded(asked: Quantization, tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path, intermediate_size=128)

    def rank(group: ThreadGroup) -> tuple[LoadedModel, Tensor]:
        model = load(path, FUSED, group, asked)
        return model, logits(model)

    ranks = by_all(2, rank)
    numbers = load_file(path / "model.safetensors")
    parts = [dict(model._module.named_modules()) for model, _ in ranks]
    for name, part in parts[0].items():
        if isinstance(part, NarrowLinear):
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            found = torch.cat([decode(modules[name].narrow) for modules in parts], dim)
            assert (found - numbers[f"{name}.weight"]).abs().max() < 0.1
            numbers[f"{name}.weight"] = found
    wide = LlamaForCausalLM(tiny.config_of("llama", intermediate_size=128))
    wide.load_state_dict(numbers)
    expected = wide.train(False)(torch.tensor([TEXT])).logits[0].detach()
    for _, found in ranks:
        assert (found - expected).abs().max() < 3e-5 * expected.abs().max()


WIDE_ENOUGH = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 256, "intermediate_size": 128},
    "mixtral": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 128},
}


@pytest.mark.parametrize(
    ("dialect", "family"),
    [
        ("fp8 block", "qwen3_moe"),
        ("ct fp8 channel", "qwen3_moe"),
        ("ct int4", "qwen3_moe"),
        ("gptq", "qwen3_moe"),
        ("fp8 block", "mixtral"),
        ("gptq", "mixtral"),
        ("mxfp4", "gpt_oss"),
    ],
)
@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
def test_ranks_compute_what_one_device_does_with_narrow_experts(
    only: ForwardInfo, dialect: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = WIDE_ENOUGH[family]
    monkeypatch.setitem(tiny_narrow_experts.SIZES, family, sizes)
    if dialect == "mxfp4":
        path, _ = tiny_narrow_experts.build_mxfp4(tmp_path)
    else:
        path, _ = tiny_narrow_experts.build(tmp_path, dialect, family)
    whole = load(path, only, family=family, **sizes)
    expected = logits(whole)

    def rank(group: ThreadGroup) -> tuple[LoadedModel, Tensor]:
        model = load(path, only, group, family=family, **sizes)
        return model, logits(model)

    ranks = by_all(2, rank)
    for _, found in ranks:
        assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
    parts = [_experts(model) for model, _ in ranks]
    for name, module in _experts(whole).items():
        for product, dim in (("gate_up", 1), ("down", 2)):
            of_ranks = [decode_stack(getattr(part[name], product)) for part in parts]
            found = torch.cat(of_ranks, dim)
            if product == "gate_up" and not module.clamped:  # gates of all ranks, then ups
                halves = [one.chunk(2, 1) for one in of_ranks]
                found = torch.cat([half for pair in zip(*halves, strict=True) for half in pair], 1)
            assert torch.equal(found, decode_stack(getattr(module, product))), (name, product)


@pytest.mark.parametrize("asked", [None, Quantization.INT8], ids=["stored", "rounded"])
@pytest.mark.parametrize(
    ("family", "only"),
    [
        ("minimax_m2", MODULES),
        ("ernie4_5_moe", FUSED),
        ("hunyuan_v1_moe", FUSED),
        ("hy_v3", FUSED),
    ],
)
def test_ranks_share_narrow_weights_of_families_that_kvant_probes(
    family: str, only: ForwardInfo, asked: Quantization | None, tmp_path: Path
) -> None:
    path, exact = tiny_narrow_experts.build_family(tmp_path, family)
    check_ranks(path if asked is None else exact, only, asked)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_ranks_share_narrow_weights_beside_a_vision_encoder(family: str, tmp_path: Path) -> None:
    check_ranks(tiny_narrow_experts.build_nested(tmp_path, family)[0], FUSED, None)


def check_ranks(path: Path, only: ForwardInfo, asked: Quantization | None) -> None:
    """Two ranks of a model with experts compute what one device does, within the parts they hold."""
    request = PlanRequest(
        str(path), GPU, dtype=ComputeDtype.BFLOAT16, tensor_parallel_size=2, quantization=asked
    )
    planned = plan_of(request)
    assert planned.division is not None
    geometry = planned.target.geometry
    whole = load(path, only, None, asked, geometry)
    expected = logits(whole)

    def rank(group: ThreadGroup) -> tuple[LoadedModel, Tensor]:
        model = load(path, only, group, asked, geometry)
        return model, logits(model)

    ranks = by_all(2, rank)
    for _, found in ranks if asked is None else ():  # ranks do not round the head
        assert (found - expected).abs().max() < 3e-5 * expected.abs().max()
    parts = [_experts(model) for model, _ in ranks]
    for name, module in _experts(whole).items():
        found, wanted = (
            torch.cat([decode_stack(part[name].down) for part in parts], 2),
            decode_stack(module.down),
        )
        # A rank that rounds has scales of its own.
        most = 0.0 if asked is None else 0.01 * float(wanted.abs().max())
        assert (found - wanted).abs().max() <= most


def _experts(model: LoadedModel) -> dict[str, NarrowExperts]:
    found = {n: p for n, p in model._module.named_modules() if isinstance(p, NarrowExperts)}
    assert found
    return found


def decode_stack(stack: NarrowStack) -> Tensor:
    return torch.stack([decode(stack.one(i)) for i in range(stack.shape[0])])


@pytest.mark.parametrize("asked", [Quantization.FP8, Quantization.INT4])
def test_each_rank_rounds_its_part_of_experts(asked: Quantization, tmp_path: Path) -> None:
    sizes = WIDE_ENOUGH["qwen3_moe"]
    path = tiny.build("qwen3_moe", tmp_path, **sizes)

    def rank(group: ThreadGroup) -> tuple[LoadedModel, Tensor]:
        model = load(path, FUSED, group, asked, "qwen3_moe", **sizes)
        return model, logits(model)

    ranks = by_all(2, rank)
    whole = AutoModelForCausalLM.from_pretrained(path)
    parts = [dict(model._module.named_modules()) for model, _ in ranks]
    with torch.no_grad():
        for name, module in whole.named_modules():
            held = [part.get(name) for part in parts]
            if isinstance(held[0], NarrowLinear):
                dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
                _replace(module.weight, torch.cat([decode(one.narrow) for one in held], dim))
            elif isinstance(held[0], NarrowExperts):
                _replace(module.down_proj, torch.cat([decode_stack(one.down) for one in held], 2))
                halves = [decode_stack(one.gate_up).chunk(2, 1) for one in held]
                pairs = zip(*halves, strict=True)
                _replace(
                    module.gate_up_proj, torch.cat([half for pair in pairs for half in pair], 1)
                )
        expected = whole(torch.tensor([TEXT])).logits[0]
    for _, found in ranks:
        assert (found - expected).abs().max() < 3e-5 * expected.abs().max()


def _replace(weight: Tensor, rounded: Tensor) -> None:
    """Take numbers that are near those of the weight."""
    assert (rounded - weight).abs().max() < 0.2 * weight.abs().max()
    weight.copy_(rounded)
