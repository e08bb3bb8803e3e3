"""The weight audit names every stored tensor: its format, and whether it is used."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.execution.runner import ModelRunner
from kvant.kv.dtype import ComputeDtype
from kvant.kv.names import parse_format
from kvant.kv.request import Asked, KVRequest, Requests
from kvant.models.gguf_import import import_gguf
from kvant.models.quantization import Activations, Quantization
from kvant.models.weight_audit import TensorState, WeightAudit
from kvant.plan.plan import PlanRequest
from kvant.plan.planning import make_plan
from kvant.plan.read_facts import read_facts
from tests.cli.command import kvant
from tests.models import families, tiny, tiny_gguf, tiny_multimodal, tiny_narrow_experts
from tests.models.tiny_narrow import DIALECTS, build
from tests.planned import plan_of

GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
_UP = "model.layers.1.mlp.up_proj"
_CODES = ("weight", "weight_packed", "qweight")
_INPUTS = ("input_scale", "activation_scale")


def audit(path: Path, device: DeviceFacts = GPU, **options: Any) -> WeightAudit:
    request = PlanRequest(str(path), device, **{"dtype": ComputeDtype.BFLOAT16, **options})
    found = plan_of(request).audit
    assert found is not None
    return found


def _with(path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _declare(path: Path, **changes: object) -> Path:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_tensor_of_every_dialect_is_named_and_used(dialect: str, tmp_path: Path) -> None:
    path, _ = build(tmp_path, dialect)
    tensors = load_file(path / "model.safetensors")
    found = audit(path)
    assert {one.name for one in found.tensors} == set(tensors)
    assert not found.faults
    unused = {
        one.name.rpartition(".")[2] for one in found.tensors if one.state is TensorState.UNUSED
    }
    assert unused <= {"weight_shape"}
    for one in found.tensors:
        if not one.name.endswith(tuple(f"_proj.{code}" for code in _CODES)):
            assert one.role != "codes", one
            continue
        assert one.role == "codes"
        assert one.shape == tuple(tensors[one.name].shape)
        assert " per " in one.format
        assert one.because == "runs as it is stored"
    counted = Counter(one.role for one in found.tensors)
    assert counted["codes"] == counted["scales"] == 28
    assert counted["zero points"] == (
        28 if "zero" in dialect or dialect.startswith(("awq", "gptq")) else 0
    )
    is_indexed = dialect.startswith("gptq") or "reordered" in dialect
    assert counted["order of inputs"] == (28 if is_indexed else 0)
    assert counted["scales of activations"] == (
        28 if "static" in dialect or "opt fp8" in dialect else 0
    )
    assert counted["factors of scales"] == (28 if "nvfp4" in dialect else 0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_a_dialect_lacks_or_spoils_is_named_and_refused(dialect: str, tmp_path: Path) -> None:
    path, _ = build(tmp_path, dialect, num_hidden_layers=2)
    whole = load_file(path / "model.safetensors")
    optional = {"weight_shape"} if "reordered" in dialect else {"weight_shape", "g_idx"}
    for name in [name for name in whole if name.startswith(f"{_UP}.")]:
        short = name.rpartition(".")[2]
        spoiled = [None, whole[name].reshape(-1).repeat(3), whole[name].to(torch.complex64)]
        for made, state in zip(spoiled, ("missing", "wrong", "wrong"), strict=True):
            tensors = {n: t for n, t in whole.items() if n != name}
            if made is not None:
                tensors[name] = made
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
            found = audit(path)
            if made is None and short in optional:
                assert not found.faults
                continue
            (line,) = found.faults
            assert line.startswith(f"{name} (")
            assert f" is {state}: " in line
            assert found.refusal is not None
            assert name in str(found.refusal)


@pytest.mark.parametrize(
    "dialect", ["modelopt fp8", "ct fp8 static", "fp8 static", "autofp8 static"]
)
def test_scales_of_activations_are_named_as_unused_with_the_reason(
    dialect: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, dialect)
    (line,) = audit(path, activations=Activations.EXACT).unused
    assert " and 27 more (scales of activations) are unused: products take 16-bit act" in line
    assert line.split(" ")[0].endswith(_INPUTS)
    (line,) = audit(path, activations=Activations.FP8).unused
    assert line.endswith("activations are rounded as fp8, which computes scales")


def test_decoded_weights_are_named_with_the_reason(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "ct mxfp4")
    found = audit(path, DeviceFacts(DeviceKind.CPU), dtype=None)
    reasons = {one.because for one in found.tensors if one.role == "scales"}
    assert reasons == {
        "decoded while they are loaded: weights of mxfp4 run as they are stored on NVIDIA GPUs"
    }


@pytest.mark.parametrize(
    ("dialect", "field"), [("fp8 block", "modules_to_not_convert"), ("ct int8", "ignore")]
)
def test_codes_of_a_layer_that_is_left_alone_are_not_taken_for_numbers(
    dialect: str, field: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, dialect)
    _declare(path, **{field: ["lm_head", _UP]})
    found = audit(path)
    (fault,) = found.faults
    assert fault.startswith(f"{_UP}.weight (numbers) is wrong: the quantization_config leaves")
    (unused,) = found.unused
    assert unused.startswith(f"{_UP}.weight_scale")
    with pytest.raises(BadCheckpoint, match=rf"{_UP}\.weight has the dtype"):
        LLM(path, device="cpu")


@pytest.mark.parametrize("dialect", ["ct int4", "awq", "ct nvfp4"])
def test_codes_of_an_undeclared_format_are_named(dialect: str, tmp_path: Path) -> None:
    path, _ = build(tmp_path, dialect)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    _refused_by_both(path, r"(weight_packed|qweight) holds codes(.|\n)*no quantization_config")


def test_a_layer_of_16_bits_may_be_left_alone(tmp_path: Path) -> None:
    path, numbers = build(tmp_path, "fp8 block")
    _declare(path, modules_to_not_convert=["lm_head", _UP])

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[f"{_UP}.weight"] = numbers[f"{_UP}.weight"]
        del tensors[f"{_UP}.weight_scale_inv"]

    found = audit(_with(path, widen))
    assert not found.faults
    assert not found.unused
    (one,) = (one for one in found.tensors if one.layer == _UP)
    assert (one.role, one.format) == ("numbers", "F32")


def test_tensors_that_a_format_does_not_have_are_named(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "awq")
    found = audit(_with(path, lambda t: t.update({f"{_UP}.weight_scale_2": torch.ones(1)})))
    assert found.unused == (
        f"{_UP}.weight_scale_2 (factors of scales) is unused: awq has no such tensor",
    )
    assert not found.faults
    found = audit(_with(path, lambda t: t.update({f"{_UP}.pre_quant_scale": torch.ones(64)})))
    (line,) = found.faults
    assert line.startswith(f"{_UP}.pre_quant_scale (scales of activations) is wrong: inputs of its")


def test_layers_that_the_model_does_not_run_are_named(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "fp8 block")

    def add(tensors: dict[str, Tensor]) -> None:
        more = {
            name.replace(".layers.0.", ".layers.4."): tensor.clone()
            for name, tensor in tensors.items()
            if ".layers.0.mlp.up_proj." in name
        }
        tensors.update(more)

    found = audit(_with(path, add))
    assert not found.faults
    assert sorted(found.unused) == [
        "model.layers.4.mlp.up_proj.weight (numbers) is unused: the model does not run this layer",
        "model.layers.4.mlp.up_proj.weight_scale_inv (scales) is unused: the model does not run this layer",
    ]  # fmt: skip


@pytest.mark.parametrize("asked", [Quantization.INT8, Quantization.INT4])
def test_a_probed_model_is_rounded_in_the_planned_bytes(
    asked: Quantization, tmp_path: Path
) -> None:
    families.build("internvl", tmp_path)
    request = PlanRequest(str(tmp_path), DeviceFacts(DeviceKind.CPU), quantization=asked)
    planned = plan_of(request).target.weights.bytes
    llm = LLM(tmp_path, quantization=asked.value, kv_cache_memory="1MiB")
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert planned == pytest.approx(runner.model.num_weight_bytes, rel=0.02)


def test_a_tower_that_the_text_model_lacks_is_unused_and_not_counted(tmp_path: Path) -> None:
    config = families.tiny_config("qwen3_5")
    tower = config.vision_config
    tower.hidden_size = tower.intermediate_size = 32
    tower.num_heads, tower.out_hidden_size = 2, 64
    AutoModelForImageTextToText.from_config(config).save_pretrained(  # type: ignore[no-untyped-call]
        tmp_path
    )
    found = plan_of(PlanRequest(str(tmp_path), DeviceFacts(DeviceKind.CPU)))
    assert found.audit is not None
    assert not found.audit.faults
    unread = {one.name for one in found.audit.tensors if one.state is TensorState.UNUSED}
    stored = load_file(tmp_path / "model.safetensors")
    assert unread == {name for name in stored if name.startswith("model.visual.")}
    read = sum(4 * tensor.numel() for name, tensor in stored.items() if name not in unread)
    assert found.target.weights.bytes == read
    name = "model.language_model.layers.3.self_attn.o_proj.weight"
    _with(tmp_path, lambda t: t.pop(name))
    _refused_by_both(tmp_path, f"{name} is missing")


@pytest.mark.parametrize("name", ["mtp.layers.0.mlp.up_proj", "model.mtp.fc"])
def test_modules_that_predict_further_tokens_are_unused(name: str, tmp_path: Path) -> None:
    path, _ = build(tmp_path, "fp8 block")

    def more(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight"] = tensors[f"{_UP}.weight"].clone()
        tensors[f"{name}.weight_scale_inv"] = tensors[f"{_UP}.weight_scale_inv"].clone()

    found = audit(_with(path, more))
    assert not found.faults
    (layer,) = {one.because for one in found.tensors if one.name.startswith(name)}
    assert layer == "the model does not run this layer"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bool])
def test_a_weight_of_integers_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    name = f"{_UP}.weight"
    _with(path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(BadCheckpoint, match=rf"{name} has the dtype"):
        LLM(path, device="cpu")


def test_scales_of_the_kv_cache_are_used_as_the_plan_says(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "awq")

    def add(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            for side in "kv":
                tensors[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"] = torch.tensor(
                    0.5
                )

    _with(path, add)
    found = {one.name: one for one in audit(path).tensors}
    one = found["model.layers.2.self_attn.k_proj.k_scale"]
    assert (one.role, one.state) == ("scales of the KV cache", TensorState.UNUSED)
    assert not audit(path).unused
    asked = Asked(parse_format("fp8", asked_by="test"), "test")
    fp8 = Requests(target=KVRequest(explicit=(asked,)))
    (group,) = (g for g in audit(path, requests=fp8).groups if "scales of" in g.text)
    assert group.text == "F32: 8 tensors of scales of the KV cache, used: needed by fp8_e4m3"


@pytest.mark.parametrize("dialect", ["fp8 block", "awq"])
def test_experts_are_named_one_by_one(dialect: str, tmp_path: Path) -> None:
    path, _ = tiny_narrow_experts.build(tmp_path, dialect)
    found = audit(path)
    assert not found.faults
    assert not found.unused
    experts = [one for one in found.tensors if ".experts." in one.name]
    assert {one.role for one in experts} >= {"codes", "scales"}
    assert {one.because for one in experts} == {"runs as it is stored"}
    name = experts[-1].name
    (line,) = audit(_with(path, lambda tensors: tensors.pop(name))).faults
    assert line.startswith(f"{name} (")


def test_experts_in_blocks_are_named_by_layer(tmp_path: Path) -> None:
    path, _ = tiny_narrow_experts.build_mxfp4(tmp_path)
    found = audit(path)
    assert not found.faults
    assert not found.unused
    blocks = [one for one in found.tensors if one.name.endswith(("_blocks", "_scales"))]
    assert {one.role for one in blocks} == {"codes", "scales"}
    assert {one.format for one in blocks} == {"mxfp4, a scale per 32 inputs (mxfp4)"}
    name = blocks[0].name
    (line,) = audit(_with(path, lambda tensors: tensors.pop(name))).faults
    assert line.startswith(f"{name} (codes) is missing")


def test_blocks_of_a_gguf_file_are_named_by_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    values = tiny_gguf.tensors()
    types = {name: tiny_gguf.QUANTIZED for name in values if "ffn" in name and "norm" not in name}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.metadata(), values, "llama", types)
    found = audit(import_gguf(path, blocks=True))
    assert not found.faults
    formats = {one.format for one in found.tensors if one.role == "codes"}
    assert formats == {"int8, a scale per 32 inputs (gguf)"}


def test_rounded_matrices_are_named(tmp_path: Path) -> None:
    found = audit(tiny.build("llama", tmp_path), quantization=Quantization.FP8)
    said = {one.name: one.because for one in found.tensors}
    assert Counter(said.values()) == {
        "rounded to fp8 while it is loaded": 28,
        "rounded to int8 while it is loaded": 1,
        "loaded as the compute dtype": 10,
    }
    assert said["lm_head.weight"] == "rounded to int8 while it is loaded"
    assert said["model.embed_tokens.weight"] == "loaded as the compute dtype"


def test_biases_are_not_named_as_rounded(tmp_path: Path) -> None:
    found = audit(tiny.build("qwen2", tmp_path), quantization=Quantization.INT8)
    (because,) = {one.because for one in found.tensors if one.name.endswith(".bias")}
    assert because == "loaded as the compute dtype"


def test_fused_matrices_are_named_as_rounded(tmp_path: Path) -> None:
    found = audit(tiny.build("phi3", tmp_path), quantization=Quantization.INT8)
    (because,) = {one.because for one in found.tensors if "qkv_proj" in one.name}
    assert because == "rounded to int8 while it is loaded"


def test_a_field_that_is_missing_is_as_the_class_has_it(tmp_path: Path) -> None:
    path = tiny.build("llama", tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["intermediate_size"]
    (path / "config.json").write_text(json.dumps(config))
    _refused_by_both(path, "mlp.down_proj.weight has the shape(.|\n)*makes it 64 x 11008")


def test_a_model_with_an_inner_width_for_each_layer_is_rounded(tmp_path: Path) -> None:
    path = tiny.build("gemma3n", tmp_path)
    inner = json.loads((path / "config.json").read_text())["intermediate_size"]
    assert isinstance(inner, list)
    plan = plan_of(PlanRequest(str(path), GPU, dtype=ComputeDtype.BFLOAT16,
                               quantization=Quantization.INT8))  # fmt: skip
    assert plan.forward.extra_bytes >= 2 * plan.target.geometry.hidden_size * 2 * max(inner)


def test_the_plan_lists_the_tensors_if_asked(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "modelopt fp8")
    asked = ("plan", str(path), "--device", "sm_90", "--dtype", "bfloat16")
    table = kvant(*asked).out
    assert (
        "28 tensors of scales of activations, 28 of codes, 28 of scales, used: runs as it is stored"
        in table
    )
    assert f"{_UP}.weight_scale" not in table
    line = f"{_UP}.weight_scale  F32 1  fp8_e4m3, a scale per matrix (modelopt FP8), scales: used, "
    assert line in kvant(*asked, "--tensors").out
    assert "kvant serve" in kvant(*asked, "--tensors").out
    short = json.loads(kvant(*asked, "--format", "json").out)["weights"]
    assert short.keys() == {"groups", "scales"}
    assert [group["state"] for group in short["groups"]] == ["used", "used"]
    found = json.loads(kvant(*asked, "--format", "json", "--tensors").out)["weights"]["tensors"]
    assert len(found) == len(load_file(path / "model.safetensors"))
    (one,) = (one for one in found if one["tensor"] == f"{_UP}.input_scale")
    assert one == {
        "tensor": f"{_UP}.input_scale", "format": "fp8_e4m3, a scale per matrix (modelopt FP8)",
        "role": "scales of activations", "dtype": "F32", "shape": [], "state": "used",
        "because": "runs as it is stored",
    }  # fmt: skip


def test_an_engine_names_unused_scales_once_and_with_the_reason(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "gptq")
    more = {f"model.layers.{n}.mlp.up_proj.input_scale": torch.ones(1) for n in range(4)}
    llm = LLM(_with(path, lambda tensors: tensors.update(more)), device="cpu")
    (note,) = (note for note in llm.notes if "input_scale" in note)
    assert note == (
        "model.layers.0.mlp.up_proj.input_scale and 3 more (scales of activations) are unused: "
        "products take 16-bit activations"
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # compiled; left to transformers' modules
def test_a_config_with_other_heads_than_the_files_is_refused_by_plan_and_start(
    family: str, tmp_path: Path
) -> None:
    path = tiny.build(family, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["num_key_value_heads"] = 4
    (path / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.self_attn.k_proj.weight"
    found = plan_of(PlanRequest(str(path), DeviceFacts(DeviceKind.CPU)))
    assert not found.can_run
    assert any(name in line and "config.json makes it 64 x 64" in line for line in found.warnings)
    with pytest.raises(BadCheckpoint, match=rf"{name} has the shape 32 x 64") as refused:
        LLM(path, kv_cache_memory="1MiB")
    assert refused.value.ways_out


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_whole_checkpoint_has_all_weights_in_their_shapes(family: str, tmp_path: Path) -> None:
    path = tiny.build(family, tmp_path)
    found = plan_of(PlanRequest(str(path), DeviceFacts(DeviceKind.CPU))).audit
    assert found is not None
    assert found.faults == ()


def _kinds(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in numbers of layers and experts only."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(re.sub(r"\.\d+(?=\.)", "", name), []).append(name)
    return list(found.values())


_RUN = [name for name in tiny.FAMILIES if name != "mimo_v2_flash"]


@pytest.mark.parametrize("family", [*_RUN, "gemma3 tower", "gemma4 tower"])
def test_no_tensor_of_a_checkpoint_can_be_lost_or_cut(family: str, tmp_path: Path) -> None:
    name, _, tower = family.partition(" ")
    path = tiny_multimodal.build(name, tmp_path) if tower else tiny.build(name, tmp_path)
    request = PlanRequest(str(path), DeviceFacts(DeviceKind.CPU))
    facts = read_facts(request)

    def refused(tensors: Mapping[str, Any]) -> set[str]:
        target = replace(facts.target, tensors=tensors)
        found = make_plan(request, replace(facts, target=target)).audit
        assert found is not None
        return {one.name for one in found.tensors if one.fault is not None}

    assert facts.target.tensors is not None
    whole = dict(facts.target.tensors)
    assert refused(whole) == set()
    for names in _kinds(whole):
        one = names[0]  # of experts, the first: others are counted elsewhere
        dtype, shape = whole[one]
        assert _experts(one) in map(_experts, refused({k: v for k, v in whole.items() if k != one}))
        assert refused({k: v for k, v in whole.items() if k not in names})
        assert refused({**whole, one: (dtype, (2 * (shape or (1,))[0], *shape[1:]))}) == {one}


def _experts(name: str) -> str:
    """A name without what files of experts name in another way than Kvant."""
    return name.partition(".experts.")[0]


def _refused_by_both(path: Path, words: str) -> None:
    found = plan_of(PlanRequest(str(path), DeviceFacts(DeviceKind.CPU)))
    assert not found.can_run
    assert found.audit is not None
    assert found.audit.refusal is not None
    with pytest.raises(BadCheckpoint, match=words) as refused:
        LLM(path, kv_cache_memory="1MiB")
    assert str(refused.value) == str(found.audit.refusal)
    assert refused.value.ways_out


def test_weights_in_another_file_are_refused_by_plan_and_start_and_the_ways_out_work(
    tmp_path: Path,
) -> None:
    """transformers reads the file that config.json names, which may be of another model."""
    families.build("llama", tmp_path)
    whole, file = tmp_path / "model.safetensors", tmp_path / "config.json"
    (tmp_path / "other.safetensors").write_bytes(whole.read_bytes())
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    found = plan_of(PlanRequest(str(tmp_path), DeviceFacts(DeviceKind.CPU)))
    assert not found.can_run
    assert any("transformers_weights is 'other.safetensors'" in line for line in found.obstacles)
    with pytest.raises(BadCheckpoint, match="transformers_weights is 'other") as refused:
        LLM(tmp_path, kv_cache_memory="1MiB")
    (in_a_copy, instead) = refused.value.ways_out
    assert instead.arguments[0] == "--hf-overrides"
    LLM(tmp_path, kv_cache_memory="1MiB", hf_overrides=json.loads(instead.arguments[1]))
    assert "replace model.safetensors by other.safetensors" in in_a_copy.text
    (tmp_path / "other.safetensors").replace(whole)
    file.write_text(json.dumps(config))
    LLM(tmp_path, kv_cache_memory="1MiB")
    file.write_text(json.dumps({**config, "transformers_weights": "model.safetensors"}))
    LLM(tmp_path, kv_cache_memory="1MiB")


def test_weights_of_a_probed_family_are_compared_too(tmp_path: Path) -> None:
    families.build("stablelm", tmp_path)
    name = "model.layers.1.input_layernorm.weight"
    whole = plan_of(PlanRequest(str(tmp_path), DeviceFacts(DeviceKind.CPU))).audit
    assert whole is not None
    assert whole.faults == ()
    _with(tmp_path, lambda t: t.update({name: t[name][:-1].clone()}))
    _refused_by_both(tmp_path, f"{name} has the shape")
    _with(tmp_path, lambda t: t.pop(name))
    _refused_by_both(tmp_path, f"{name} is missing")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.input_layernorm.weight"),
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen2", "model.layers.0.self_attn.k_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.gate.weight"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
        ("gemma3", "lm_head.weight"),
    ],
)
def test_a_weight_that_the_files_lack_is_named_by_plan_and_start(
    family: str, name: str, tmp_path: Path
) -> None:
    path = _with(tiny.build(family, tmp_path), lambda t: t.pop(name))
    _refused_by_both(path, f"{name} is missing")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.input_layernorm.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3_moe", "model.layers.1.mlp.experts.1.down_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.gate.weight"),
        ("gpt_oss", "model.layers.1.self_attn.sinks"),
    ],
)
def test_a_weight_of_another_shape_is_named_by_plan_and_start(
    family: str, name: str, tmp_path: Path
) -> None:
    path = _with(tiny.build(family, tmp_path), lambda t: t.update({name: t[name][:-1].clone()}))
    _refused_by_both(path, f"{name} has the shape")


def test_filters_may_have_the_sizes_of_their_products_in_files(tmp_path: Path) -> None:
    families.build("olmo_hybrid", tmp_path)
    assert audit(tmp_path).faults == ()
    families.divide_filters(tmp_path)
    assert audit(tmp_path).faults == ()
    LLM(tmp_path, kv_cache_memory="1MiB")
    name = "model.layers.0.linear_attn.q_conv1d.weight"
    _refused_by_both(
        _with(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1]})),
        "conv1d.weight has the shape",
    )


def test_experts_one_by_one_are_refused_where_transformers_reads_stacks(tmp_path: Path) -> None:
    families.build("qwen3_vl_moe", tmp_path)

    def part(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors.update(tiny_narrow_experts.apart(name, tensors.pop(name)))

    _refused_by_both(_with(tmp_path, part), "down_proj is missing[^.]*\\n.*each expert by itself")


def _as_modules(name: str, path: Path) -> None:
    """Write a family's model with the names of transformers' modules."""
    families.build(name, path)
    model = families.auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path)
    model.save_pretrained(path, save_original_format=False)


@pytest.mark.parametrize("name", ["ernie4_5_vl_moe", "minimax_m3_vl"])
def test_experts_under_names_that_no_rule_joins_are_missing(name: str, tmp_path: Path) -> None:
    _as_modules(name, tmp_path)
    assert audit(tmp_path).refusal is None

    def part(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors.update(tiny_narrow_experts.apart(name, tensors.pop(name)))

    _refused_by_both(_with(tmp_path, part), "down_proj is missing[^.]*\n.*each expert by itself")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma"])
def test_names_that_the_class_does_not_read_are_missing(name: str, tmp_path: Path) -> None:
    families.build(name, tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    _refused_by_both(_with(tmp_path, rename), "lm_head.weight is missing")


@pytest.mark.parametrize("place", ["", "model.model."])
def test_names_without_the_base_or_with_two_are_read(place: str, tmp_path: Path) -> None:
    families.build("llama", tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[place + name.removeprefix("model.")] = tensors.pop(name)

    assert audit(_with(tmp_path, rename)).refusal is None
    LLM(tmp_path, kv_cache_memory="1MiB")


@pytest.mark.parametrize("product", ["gate_up_proj", "down_proj"])
def test_transposed_experts_are_refused_where_transformers_reads_one_form(
    product: str, tmp_path: Path
) -> None:
    families.build("gpt_oss", tmp_path)

    def turn(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(product)]:
            tensors[name] = tensors[name].transpose(1, 2)

    _refused_by_both(_with(tmp_path, turn), f"{product} has the shape")


@pytest.mark.parametrize(
    "name",
    [
        "dots1",  # experts apart, which transformers joins; biases that are buffers; one dense layer
        "granitemoe",  # other names of experts' modules
        "dbrx",  # layers that are called blocks
        "cosmos3_edge",  # another place and other names of everything
    ],
)
def test_a_probed_model_misses_every_kind_of_tensor_of_its_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    families.build(name, path)
    whole = load_file(path / "model.safetensors")
    assert audit(path).refusal is None
    for one in {re.sub(r"\.\d+(?=\.|$)", ".N", name): name for name in whole}.values():
        others = {name: tensor for name, tensor in whole.items() if name != one}
        longer = torch.cat([whole[one], whole[one][:1]])
        for found in (others, {**others, one: longer}):
            save_file(found, path / "model.safetensors", metadata={"format": "pt"})
            refused = audit(path).refusal
            assert refused is not None, one
            assert one.removesuffix(".weight") in str(refused)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"num_experts": 0}),
        ("qwen2_moe", {"decoder_sparse_step": 100}),
        ("qwen2_moe", {"decoder_sparse_step": 2}),
        ("qwen3_moe", {"decoder_sparse_step": 100}),
    ],
)
def test_experts_stand_for_no_dense_layers(
    family: str, changes: dict[str, int], tmp_path: Path
) -> None:
    path = tmp_path / "model"
    families.build(family, path)
    assert audit(path).refusal is None
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    _refused_by_both(path, r"mlp\.down_proj\.weight is missing")


@pytest.mark.parametrize("name", ["dots1", "cosmos3_edge"])
def test_files_in_the_form_of_the_modules_are_whole_too(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    _as_modules(name, path)
    assert audit(path).refusal is None
    LLM(path, kv_cache_memory="1MiB")


def test_factors_of_a_projection_stand_for_no_whole_one(tmp_path: Path) -> None:
    families.build("deepseek_v3", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "q_lora_rank": None}))
    refused = audit(tmp_path / "model").refusal
    assert refused is not None
    assert "q_proj.weight is missing" in str(refused)


@pytest.mark.parametrize("dialect", ["ct fp8 channel", "ct int8 packed"])
def test_a_wide_head_that_is_not_ignored_is_refused_and_its_way_out_works(
    dialect: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, dialect)
    _declare(path, ignore=[])
    refused = audit(path).refusal
    assert refused is not None
    name = re.search(r'add "(.+)" to quantization_config.ignore', str(refused))
    assert name is not None
    assert name[1] == "lm_head"
    _declare(path, ignore=[name[1]])
    assert audit(path).refusal is None
    LLM(path, kv_cache_memory="1MiB")
