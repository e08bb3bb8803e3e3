"""Checkpoints with narrow weights, run as they are stored: the model of the dialect's own numbers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from kvant import LLM, SamplingParams
from kvant.attention.cpu.backend import backend as cpu_backend
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, NotServable
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.forward_info import ForwardFacts, ForwardInfo
from kvant.models.fused.info import INFO as FUSED
from kvant.models.geometry.weight_recipe import Recipe, read_recipe
from kvant.models.load import load_model
from kvant.models.loaded import LoadedModel
from kvant.models.modules.info import INFO as MODULES
from kvant.models.quantized import check_decoded
from kvant.models.select import select_forward
from kvant.models.stored import (
    NotStored,
    Stored,
    decoded_here,
    read_stored,
    refuse_left,
    refuse_unreadable,
)
from kvant.plan.plan import PlanRequest
from kvant.plan.scale_values import check_values
from kvant.weights.codecs import decode
from kvant.weights.linear import NarrowLinear
from tests.attention import driver
from tests.models import families, loading, tiny, tiny_multimodal
from tests.models.tiny_narrow import DIALECTS, Layer, build, packed, whole_bytes
from tests.planned import plan_of

CPU, GPU = DeviceFacts(DeviceKind.CPU), DeviceFacts(DeviceKind.CUDA, "sm_90")
TEXT = [(7 * i + i * i) % 120 + 3 for i in range(45)]
IN_BLOCKS: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128],
            },
        }
    },
}  # fmt: skip


def load(path: Path, only: ForwardInfo = MODULES) -> LoadedModel:
    """On this CPU, as a GPU would load it; products decode their weights then."""
    return loading.load_as_on_gpu(path, tiny.geometry("llama"), only)


def logits(model: LoadedModel) -> Tensor:
    return loading.logits(model, TEXT)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stored_weight_is_the_numbers_that_its_dialect_means(
    dialect: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect)
    module = load(path)._module
    narrow = {n: part for n, part in module.named_modules() if isinstance(part, NarrowLinear)}
    assert len(narrow) == 7 * module.config.num_hidden_layers
    for name, part in narrow.items():
        assert torch.equal(decode(part.narrow), numbers[f"{name}.weight"]), name
    assert torch.equal(module.lm_head.weight, numbers["lm_head.weight"])


@pytest.mark.parametrize(
    "dialect",
    [
        "fp8 block",
        "ct fp8 tensor",
        "ct int4 zero points",
        "ct nvfp4",
        "ct int4 reordered",
        "ct int8 reordered",
        "gptq reordered",
    ],
)
@pytest.mark.parametrize("only", [MODULES, FUSED], ids=lambda info: info.name)
def test_a_stored_model_computes_what_the_model_of_its_numbers_does(
    only: ForwardInfo, dialect: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect)
    config = tiny.make("llama").config
    wide = LlamaForCausalLM(config)
    wide.load_state_dict(numbers)
    expected = wide.train(False)(torch.tensor([TEXT])).logits[0].detach()
    found = logits(load(path, only))
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "dialect",
    [
        "ct int4", "ct int4 zero points", "ct int8", "ct int8 packed", "awq", "gptq",
        "ct int4 reordered", "ct int4 zero points reordered", "gptq reordered",
    ],
)  # fmt: skip
def test_a_cpu_computes_what_the_model_of_stored_integers_does(
    dialect: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect)
    geometry = tiny.geometry("llama")
    config = json.loads((path / "config.json").read_text())
    choice = select_forward(ForwardFacts(config, geometry, ComputeDtype.FLOAT32, CPU))
    assert choice.info is not None
    assert choice.info.name == "compiled", choice.refused
    assert choice.stored is not None
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT32)
    model = load_model(path, plan, geometry, choice, device=torch.device("cpu"))
    wide = LlamaForCausalLM(tiny.make("llama").config)
    wide.load_state_dict(numbers)
    expected = wide.train(False)(torch.tensor([TEXT])).logits[0].detach()
    steps = driver.Driver(driver.pool(model.plan, 40), cpu_backend())
    ids, call, _ = steps.call([(driver.Text(TEXT), len(TEXT))])
    found = model.forward(ids, call, torch.arange(len(TEXT)))
    assert (found - expected).abs().max() < 3e-4 * expected.abs().max()


@pytest.mark.parametrize("compute", [ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_does_not_run_as_stored_is_decoded_to_the_same_numbers(
    dialect: str, compute: ComputeDtype, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect)
    found = plan_of(PlanRequest(str(path), CPU, dtype=compute))
    assert found.can_run, found.warnings
    if found.forward.stored is not None:
        return  # tested above
    assert found.target.narrow is not None
    assert found.target.narrow.startswith("decoded while they are loaded: ")
    module = load_model(
        path, found.target.kv, found.target.geometry, found.forward, device=torch.device("cpu")
    )._module
    for name, weight in module.named_parameters():
        assert torch.equal(weight, numbers[name].to(getattr(torch, compute.value))), name


def _with(path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


_UP = "model.layers.1.mlp.up_proj"


def _truncated(tensors: dict[str, Tensor]) -> None:
    tensors[f"{_UP}.weight_packed"] = tensors[f"{_UP}.weight_packed"][:, :-1]


def _short_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{_UP}.weight_scale"] = tensors[f"{_UP}.weight_scale"][:, :-1]


def _nan_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{_UP}.weight_scale"][3, 0] = float("nan")


def _zero_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{_UP}.weight_scale"][3, 0] = 0.0


def _missing_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{_UP}.weight_scale"]


def _other_dtype(tensors: dict[str, Tensor]) -> None:
    tensors[f"{_UP}.weight_packed"] = tensors[f"{_UP}.weight_packed"].to(torch.int64)


@pytest.mark.parametrize(
    ("change", "tensor", "says"),
    [
        (_truncated, "weight_packed", r"shape \[96, 7\]"),
        (_short_scales, "weight_scale", r"shape \[96, 1\]"),
        (_nan_scale, "weight_scale", "NaN"),
        (_zero_scale, "weight_scale", "zero"),
        (_missing_scales, "weight_scale", "missing"),
        (_other_dtype, "weight_packed", "dtype I64"),
    ],
)
def test_a_broken_layer_is_refused_before_loading_by_the_tensors_name(
    change: Callable[[dict[str, Tensor]], None], tensor: str, says: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, "ct int4")
    with pytest.raises(BadCheckpoint, match=says) as refused:
        load(_with(path, change))
    assert f"{_UP}.{tensor}" in str(refused.value)


_NOT_NEEDED = {"weight_shape", "g_idx"}
"""Tensors that a layer may lack: its shape is known, and its inputs are in order."""


def _spoiled(scale: Tensor, value: float) -> Tensor | None:
    """The scale with one bad number; None if its dtype has no such number, or means one by it."""
    made = scale.clone()
    if scale.dtype is torch.uint8:
        made.view(-1)[3] = 255
        return made if value != value else None
    if scale.dtype is torch.float8_e4m3fn and value in (0.0, float("inf")):
        return None
    made.view(-1)[0] = value
    return made


@pytest.mark.parametrize("dialect", DIALECTS)
def test_missing_tensors_and_bad_scales_of_every_dialect_are_refused_by_name(
    dialect: str, tmp_path: Path
) -> None:
    _all_are_refused(dialect, tmp_path, (float("nan"),), shapes=False)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_broken_tensors_of_every_dialect_are_refused_by_name(dialect: str, tmp_path: Path) -> None:
    _all_are_refused(dialect, tmp_path, (float("inf"), 0.0, -1.0), shapes=True)


def _all_are_refused(
    dialect: str, directory: Path, bad: tuple[float, ...], *, shapes: bool
) -> None:
    path, _ = build(directory, dialect, num_hidden_layers=2)
    whole = load_file(path / "model.safetensors")
    layer = {n: t for n, t in whole.items() if n.startswith(f"{_UP}.")}
    broken: list[tuple[str, Tensor | None]] = []
    for name, tensor in layer.items():
        short = name.removeprefix(f"{_UP}.")
        if shapes:
            less = tensor[..., :-1] if tensor.ndim else tensor.repeat(3)
            broken += [(name, less), (name, tensor.to(torch.complex64))]
        elif short not in _NOT_NEEDED:
            broken.append((name, None))
        if "scale" in short:
            broken += [(name, made) for v in bad if (made := _spoiled(tensor, v)) is not None]
    assert broken
    for name, made in broken:
        tensors = {n: t for n, t in whole.items() if n != name}
        if made is not None:
            tensors[name] = made.contiguous()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BadCheckpoint) as refused:
            load(path)
        assert name in str(refused.value)


def test_reordered_inputs_are_refused_by_name(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "gptq")

    def reorder(tensors: dict[str, Tensor]) -> None:
        tensors[f"{_UP}.g_idx"] = tensors[f"{_UP}.g_idx"].flip(0)

    with pytest.raises(BadCheckpoint, match=r"up_proj\.g_idx reorders"):
        load(_with(path, reorder))


def _index(change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor], str], None]:
    def changed(tensors: dict[str, Tensor], name: str) -> None:
        made = change(tensors.pop(name))
        if made is not None:
            tensors[name] = made

    return changed


def _at(place: int, value: int) -> Callable[[Tensor], Tensor]:
    return lambda index: index.index_fill(0, torch.tensor([place]), value)


@pytest.mark.parametrize("dialect", ["ct int4 reordered", "ct int8 reordered", "gptq reordered"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda index: None, "is missing"),
        (lambda index: index[:-1], r"has the shape \[63\]"),
        (lambda index: index.long(), "has the dtype I64"),
        (_at(3, 2), r"names the group 2: 64 inputs have 2 groups of 32"),
        (_at(3, -1), "names the group -1"),
        (lambda index: index * 0, "gives 64 inputs to the group 0"),
    ],
    ids=["missing", "short", "wide", "beyond", "negative", "uneven"],
)
def test_orders_of_inputs_that_are_none_are_refused_in_planning_and_at_start(
    change: Callable[[Tensor], Tensor | None], says: str, dialect: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, dialect, num_hidden_layers=2)
    name = f"{_UP}.{'g_idx' if dialect.startswith('gptq') else 'weight_g_idx'}"
    _with(path, lambda tensors: _index(change)(tensors, name))
    for device in (CPU, GPU):
        planned = check_values(plan_of(PlanRequest(str(path), device)))
        assert not planned.can_run
        (line,) = [line for line in planned.warnings if name in line]
        assert "way out" in line
        assert planned.audit is not None
        assert re.search(says, str(planned.audit.refusal).replace("\n  why: ", ": "))
    with pytest.raises(BadCheckpoint) as refused:
        LLM(path, kv_cache_memory="1MiB")
    assert name in str(refused.value)
    assert refused.value.ways_out


_BITS_AND_GROUPS = [
    (2, 32), (3, 32), (3, None), (4, None), (4, 16), (5, 48), (6, 96), (7, 32), (8, 48), (8, None),
]  # fmt: skip
_IN_BYTES = [(8, "tensor", None), (8, "channel", None), (8, "group", 48), (4, "group", 32)]
_WITHOUT_PRODUCT = [
    layer
    for zero_points in (False, True)
    for layer in (
        *(packed(bits, size, zero_points=zero_points) for bits, size in _BITS_AND_GROUPS),
        *(whole_bytes(*of, zero_points=zero_points) for of in _IN_BYTES),
    )
]


def _shown(declared: object) -> str | None:
    if not isinstance(declared, dict):
        return None
    weights = declared["config_groups"]["group_0"]["weights"]
    return "-".join(map(str, (declared["format"], *weights.values())))


@pytest.mark.parametrize(("declared", "layer"), _WITHOUT_PRODUCT, ids=_shown)
def test_integers_without_a_product_are_decoded_to_their_numbers(
    declared: dict[str, Any], layer: Layer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DIALECTS, "x", (declared, layer))
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1}
    path, numbers = build(tmp_path, "x", **sizes)
    compute = ComputeDtype.BFLOAT16
    for device in (GPU, CPU):
        found = check_values(plan_of(PlanRequest(str(path), device, dtype=compute)))
        assert found.can_run, found.warnings
    if found.forward.stored is None:
        assert "decoded while they are loaded: " in str(found.target.narrow)
    target = found.target
    module = load_model(
        path, target.kv, target.geometry, found.forward, device=torch.device("cpu")
    )._module
    for name, weight in module.named_parameters():
        assert torch.equal(weight, numbers[name].bfloat16()), name


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"num_bits": 3}, r"weight_packed has the shape \[64, 12\]"),
        ({"num_bits": 6}, r"weight_packed has the shape \[64, 12\]"),
        ({"group_size": 48}, "groups of 48 do not divide 64 inputs"),
        ({"group_size": 16}, r"weight_scale has the shape \[64, 3\]"),
        ({"strategy": "channel", "group_size": None}, r"weight_scale has the shape \[64, 3\]"),
        ({"num_bits": 3, "symmetric": False}, r"weight_packed has the shape \[64, 12\]"),
    ],
)
def test_widths_and_groups_that_the_files_contradict_are_refused_in_planning_and_at_start(
    weights: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, "ct int4", num_hidden_layers=1)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["config_groups"] = _changed_weights(**weights)
    (path / "config.json").write_text(json.dumps(config))
    for device in (CPU, GPU):
        planned = plan_of(PlanRequest(str(path), device))
        assert not planned.can_run
        assert planned.audit is not None
        faults = " ".join(str(one.fault) for one in planned.audit.tensors if one.fault)
        assert re.search(says, faults)
        assert all("way out" in line for line in planned.audit.faults)
    with pytest.raises(BadCheckpoint) as refused:
        LLM(path, kv_cache_memory="1MiB")
    assert refused.value.ways_out


@pytest.mark.parametrize("dialect", ["ct int4 reordered", "gptq reordered"])
def test_a_reordered_model_says_so_in_its_plan_and_is_not_divided(
    dialect: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, dialect)
    for device, dtype in ((CPU, ComputeDtype.FLOAT32), (GPU, ComputeDtype.BFLOAT16)):
        planned = plan_of(PlanRequest(str(path), device, dtype=dtype))
        assert planned.can_run
        assert planned.forward.stored is not None
        assert "inputs in another order" in str(planned.target.narrow)
        assert planned.audit is not None
        (group,) = [one for one in planned.audit.groups if "order of inputs" in one.roles]
        assert group.text.endswith("28 of scales, used: runs as it is stored")
    with pytest.raises(NotServable, match="act-order") as refused:
        plan_of(PlanRequest(str(path), GPU, dtype=ComputeDtype.BFLOAT16, tensor_parallel_size=2))
    assert refused.value.ways_out[0].arguments == ("--tensor-parallel-size", "1")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"model_type": "phimoe", "num_local_experts": 8}, "experts"),
        ({"text_config": {"model_type": "qwen2"}}, "several parts"),
        ({"weights": {"num_bits": 1}}, "1-bit"),
        ({"weights": {"strategy": "channel", "num_bits": 8}}, "in groups"),
    ],
)
def test_reordered_inputs_are_never_left_to_transformers(more: dict[str, Any], says: str) -> None:
    declared = copy.deepcopy(DIALECTS["ct int4 reordered"][0])
    declared["config_groups"]["group_0"]["weights"] |= more.get("weights", {})
    config = {"hidden_size": 64, **more, "quantization_config": declared}
    refused = refuse_unreadable(config)
    assert refused is not None
    assert "actorder is 'group'" in refused.what
    assert says in refused.why
    assert refused.ways_out
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "weight"
    assert refuse_unreadable(config) is None


@pytest.mark.parametrize(
    ("more", "inputs", "says"),
    [
        ({"model_type": "phimoe", "num_local_experts": 8}, {"type": "int"}, "experts"),
        ({"text_config": {"model_type": "qwen2"}}, None, "without input_activations"),
        ({"text_config": {"model_type": "qwen2"}}, {"type": "int"}, None),
    ],
)
def test_integers_in_bytes_that_transformers_cannot_read_are_refused(
    more: dict[str, Any], inputs: dict[str, Any] | None, says: str | None
) -> None:
    declared = copy.deepcopy(DIALECTS["ct int8"][0])
    declared["config_groups"]["group_0"]["input_activations"] = inputs
    config = {**more, "quantization_config": declared}
    assert decoded_here(config) is None
    for layout in ("int-quantized", "float-quantized"):
        declared["format"] = layout
        refused = refuse_left(config)
        assert (refused is None) if says is None else says in str(refused)
    declared["format"] = "pack-quantized"
    assert refuse_left(config) is None


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        (DIALECTS["ct int8"][0], "cannot join such experts"),
        (DIALECTS["ct int4 zero points"][0], "zero points of packed integers in another shape"),
        (DIALECTS["ct nvfp4"][0], "without the factor that each has"),
        (IN_BLOCKS, "scales of experts' whole outputs alone"),
    ],
)
def test_experts_that_transformers_cannot_read_are_refused_by_plan_and_start(
    declared: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "phimoe"
    config = {**families.build("phimoe", path), "quantization_config": declared}
    (path / "config.json").write_text(json.dumps(config))
    planned = plan_of(PlanRequest(str(path), CPU))
    assert any(says in line for line in planned.obstacles)
    with pytest.raises(NotServable, match=says) as refused:
        LLM(path)
    assert refused.value.ways_out


@pytest.mark.parametrize("family", ["mixtral", "gemma3"])
def test_compressed_weights_without_a_status_are_read_by_transformers(
    family: str, tmp_path: Path
) -> None:
    is_mixture = family == "mixtral"
    path = tiny.build(family, tmp_path) if is_mixture else tiny_multimodal.build(family, tmp_path)
    declared, make = copy.deepcopy(DIALECTS["ct fp8 channel"])
    declared["ignore"] = ["re:.*lm_head", "re:.*gate$", "re:.*vision.*", "re:.*multi_modal.*"]
    generator = torch.Generator().manual_seed(0)
    numbers: dict[str, Tensor] = {}

    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in sorted(tensors):
            numbers[name] = tensors[name]
            if re.search(r"layers.*(_proj|\.w\d)\.weight$", name) and "vision" not in name:
                stored, numbers[name] = make(tensors.pop(name), generator)
                layer = name.removesuffix(".weight")
                tensors.update({f"{layer}.{short}": one for short, one in stored.items()})

    _with(path, narrow)
    plain = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**plain, "quantization_config": declared}))
    assert plan_of(PlanRequest(str(path), CPU)).can_run
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = LLM(path, kv_cache_memory="1MiB").generate([TEXT], params)[0].token_ids
    (path / "config.json").write_text(json.dumps(plain))
    save_file(numbers, path / "model.safetensors", metadata={"format": "pt"})
    assert found == LLM(path, kv_cache_memory="1MiB").generate([TEXT], params)[0].token_ids


def test_codes_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "fp8 block")

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{_UP}.weight"].view(torch.uint8)[0, 0] = 0x7F

    with pytest.raises(BadCheckpoint, match=r"up_proj\.weight holds NaN"):
        load(_with(path, spoil))


def test_a_group_that_does_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "ct int4")
    config = json.loads((path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    weights = {**groups["group_0"]["weights"], "group_size": 64}  # down_proj has 96 inputs
    groups["group_0"]["targets"] = ["re:.*(?<!down)_proj$"]
    groups["group_1"] = {"targets": ["re:.*down_proj$"], "weights": weights}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=r"layers\.0\.mlp\.down_proj cannot be stored"):
        load(path)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"quant_method": "quip"}, "quip"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 48}, "groups of 48"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "groups of 0"),
        (
            {
                "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"a": {
                    "targets": ["Linear"], "weights": {
                        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 48,
                    },
                }},
            },
            "groups of 48",
        ),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "64"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ],
)  # fmt: skip
def test_what_does_not_run_as_stored_says_why(declared: dict[str, Any], says: str) -> None:
    found = read_stored({"quantization_config": declared}, GPU)
    assert isinstance(found, NotStored)
    assert says in found.reason


def test_cpus_run_integers_as_they_are_stored_and_decode_floats() -> None:
    def read(dialect: str, **more: Any) -> Stored | NotStored | None:
        return read_stored({"quantization_config": DIALECTS[dialect][0], **more}, CPU)

    for dialect in ("ct int4 zero points", "awq", "gptq", "ct int8"):
        assert isinstance(read(dialect), Stored)
    for other in (read("ct mxfp4"), read("ct fp8 channel")):
        assert isinstance(other, NotStored)
        assert "NVIDIA GPUs" in other.reason
    assert isinstance(read("awq", num_experts=8, model_type="qwen3_moe"), NotStored)
    config = {"quantization_config": DIALECTS["awq"][0]}
    assert isinstance(read_stored(config, CPU, ComputeDtype.BFLOAT16), NotStored)


def test_experts_cpus_and_wide_computing_do_not_run_as_stored() -> None:
    declared, _ = DIALECTS["fp8 block"]
    config = {"quantization_config": declared}
    assert isinstance(read_stored(config, GPU, ComputeDtype.BFLOAT16), Stored)
    wide = read_stored(config, GPU, ComputeDtype.FLOAT32)
    never = (
        read_stored(config, CPU),
        read_stored({**config, "num_experts": 8}, GPU),
        read_stored({**config, "num_experts": 8}, GPU, ComputeDtype.FLOAT32),
    )
    for other in (wide, *never):
        assert isinstance(other, NotStored)
        assert ("--dtype bfloat16 keeps them" in other.reason) == (other is wide)
    assert read_stored({}, GPU) is None


def test_ignored_layers_keep_their_numbers() -> None:
    declared, _ = DIALECTS["ct int4"]
    declared = {**declared, "ignore": ["lm_head", "re:.*down_proj"]}
    found = read_stored({"quantization_config": declared}, GPU)
    assert isinstance(found, Stored)
    assert found.scheme("model.layers.0.mlp.down_proj") is None
    assert found.scheme("model.layers.0.mlp.up_proj") is not None


def test_both_lists_of_modelopt_leave_layers_alone() -> None:
    declared = {
        **DIALECTS["modelopt fp8"][0],
        "ignore": ["*.o_proj"],
        "exclude_modules": ["up_proj"],
    }
    config = {"quantization_config": declared}
    found, recipe = read_stored(config, GPU), read_recipe(config)
    assert isinstance(found, Stored)
    assert isinstance(recipe, Recipe)
    for name in ("self_attn.o_proj", "mlp.up_proj", "lm_head", "self_attn.q_proj"):
        is_left = name != "self_attn.q_proj"
        assert (found.scheme(f"model.layers.0.{name}") is None) is is_left
        assert recipe.left_alone(f"model.layers.0.{name}") is is_left


def test_layers_have_formats_of_their_own_and_some_have_none(tmp_path: Path) -> None:
    """Down projections in fp8, one layer as numbers, the rest in int4."""
    path, numbers = build(tmp_path / "int4", "ct int4")
    other, eights = build(tmp_path / "fp8", "ct fp8 channel")
    plain = "model.layers.0.self_attn.q_proj"
    whole, down = (load_file(one / "model.safetensors") for one in (path, other))
    made = {n: x for n, x in whole.items() if "down_proj" not in n and plain not in n}
    made |= {n: x for n, x in down.items() if "down_proj" in n}
    made[f"{plain}.weight"] = numbers[f"{plain}.weight"] = torch.randn(64, 64)
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    declared = config["quantization_config"]
    groups = declared["config_groups"]
    declared |= {"format": "mixed-precision", "ignore": ["lm_head", plain]}
    groups["group_0"] |= {"format": "pack-quantized", "targets": ["re:.*(?<!down)_proj$"]}
    eight = DIALECTS["ct fp8 channel"][0]["config_groups"]["group_0"]
    groups["group_1"] = {**eight, "format": "float-quantized", "targets": ["re:.*down_proj$"]}
    (path / "config.json").write_text(json.dumps(config))
    module = load(path)._module
    for name, part in module.named_modules():
        if isinstance(part, NarrowLinear):
            wanted = eights if name.endswith("down_proj") else numbers
            assert torch.equal(decode(part.narrow), wanted[f"{name}.weight"]), name
    assert torch.equal(module.get_submodule(plain).weight, numbers[f"{plain}.weight"])


def test_a_tied_head_stays_the_embedding(tmp_path: Path) -> None:
    path, _ = build(tmp_path, "awq", tie_word_embeddings=True)
    module = load(path)._module
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_a_gpu_runs_a_stored_checkpoint_in_kvants_own_decoder() -> None:
    declared, _ = DIALECTS["ct int4"]
    config = {"model_type": "llama", "intermediate_size": 96, "quantization_config": declared}
    facts = ForwardFacts(config, tiny.geometry("llama"), ComputeDtype.BFLOAT16, GPU)
    choice = select_forward(facts)
    assert choice.stored is not None
    assert choice.info is not None
    assert choice.info.name in {"few rows", "fused"}


def _changed_weights(**changes: object) -> dict[str, Any]:
    """The groups of "ct int4" with other values of their weights."""
    groups = copy.deepcopy(DIALECTS["ct int4"][0]["config_groups"])
    for group in groups.values():
        group["weights"] |= changes
    return groups  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("dialect", "changes", "says"),
    [
        ("fp8 block", {"activation_scheme": 3}, "activation_scheme is 3"),
        ("fp8 block", {"weight_block_size": "x"}, "weight_block_size is 'x'"),
        ("fp8 block", {"quant_method": 3}, "quant_method is 3"),
        ("awq", {"bits": None}, "bits is null"),
        ("gptq", {"desc_act": "x"}, "desc_act is 'x'"),
        ("ct int4", {"ignore": 3}, "ignore is 3"),
        ("ct int4", {"ignore": ["re:("]}, "names modules by a broken pattern"),
        ("ct int4", {"format": "x"}, "format is 'x'"),
        ("ct int4", {"format": None}, "format is null"),
        ("ct int4", {"config_groups": _changed_weights(type="x")}, "type is 'x'"),
        ("ct int4", {"config_groups": _changed_weights(strategy="x")}, "strategy is 'x'"),
        ("ct int4", {"config_groups": _changed_weights(actorder="x")}, "actorder is 'x'"),
        ("ct int4", {"config_groups": _changed_weights(group_size=0)}, "group_size is 0"),
        ("ct int4", {"config_groups": _changed_weights(group_size=-1)}, "group_size is -1"),
        ("ct int4", {"config_groups": _changed_weights(type=None)}, "type is null"),
    ],
)
def test_a_declaration_of_a_wrong_kind_is_refused_in_planning_and_at_start(
    dialect: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, dialect)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    for device in (DeviceFacts(DeviceKind.CPU), GPU):
        planned = plan_of(PlanRequest(str(path), device))
        assert not planned.can_run
        assert any(says in line for line in planned.obstacles)
    with pytest.raises(BadCheckpoint, match=re.escape(says)) as refused:
        LLM(path)
    assert refused.value.ways_out


@pytest.mark.parametrize(
    ("dialect", "changes"),
    [
        # As llm-compressor writes nvfp4: inputs are rounded by block, with a static scale of the matrix.
        (
            "ct nvfp4",
            {
                "input_activations": {
                    "dynamic": "local", "group_size": 16, "num_bits": 4, "strategy": "tensor_group",
                    "symmetric": True, "type": "float",
                }
            },
        ),
        ("ct int4", {"weights": {"actorder": False}}),
        ("ct int4", {"weights": {"actorder": "weight"}}),
    ],
)  # fmt: skip
def test_declarations_of_published_checkpoints_are_planned_and_start(
    dialect: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = build(tmp_path, dialect)
    config = json.loads((path / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    for name, values in changes.items():
        group[name] = {**group.get(name, {}), **values}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    if "input_activations" in changes:
        for name in list(tensors):
            if name.endswith(".weight_packed"):
                of_inputs = name.replace("weight_packed", "input_global_scale")
                tensors[of_inputs] = torch.tensor([100.0])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for device in (DeviceFacts(DeviceKind.CPU), GPU):
        assert plan_of(PlanRequest(str(path), device)).can_run
    LLM(path, kv_cache_memory="1MiB")


def _bitnet(weight: Tensor) -> Tensor:
    """Four outputs in a byte, all of them 0."""
    return torch.full((weight.shape[0] // 4, weight.shape[1]), 0x55, dtype=torch.uint8)


def _mxfp8_scales(weight: Tensor) -> Tensor:
    return torch.full((weight.shape[0], weight.shape[1] // 32), 120, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("method", "scale", "is_read"),
    [
        ("mxfp8", "weight_scale_inv", True),
        ("mxfp8", "scale", True),
        ("mxfp8", "weight_scale", False),
        ("bitnet", "weight_scale", True),
        ("bitnet", "scales", False),
    ],
)
def test_scales_that_transformers_does_not_find_are_refused_by_plan_and_start(
    method: str, scale: str, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        if method == "bitnet":
            return {"weight": _bitnet(weight), scale: torch.ones(1)}, weight
        return {"weight": weight.to(torch.float8_e4m3fn), scale: _mxfp8_scales(weight)}, weight

    monkeypatch.setitem(DIALECTS, "x", ({"quant_method": method}, make))
    path, _ = build(tmp_path, "x", num_hidden_layers=1)
    planned = plan_of(PlanRequest(str(path), CPU))
    assert planned.can_run is is_read, planned.warnings
    if is_read:
        assert LLM(path, kv_cache_memory="1MiB").generate([[5, 6]], SamplingParams(max_tokens=1))
        return
    with pytest.raises(BadCheckpoint, match=r"proj\.weight_scale(_inv)? is missing"):
        LLM(path, kv_cache_memory="1MiB")


def test_codes_that_nothing_decodes_are_not_taken_for_numbers(tmp_path: Path) -> None:
    model = tiny.make("llama")
    check_decoded(tmp_path, model)
    up = model.get_submodule("model.layers.1.mlp.up_proj")
    codes = up.weight.data.to(torch.float8_e4m3fn)
    up.weight = torch.nn.Parameter(codes, requires_grad=False)
    with pytest.raises(BadCheckpoint, match=r"up_proj\.weight holds codes"):
        check_decoded(tmp_path, model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_mxfp4_of_families_beside_gpt_oss_is_refused(family: str) -> None:
    config = {"model_type": family, "quantization_config": {"quant_method": "mxfp4"}}
    refused = refuse_left(config)
    assert refused is not None
    assert family in refused.what
    assert refused.ways_out
    assert refuse_left({**config, "model_type": "gpt_oss"}) is None
