"""Which layers a checkpoint declares as narrow, in the words of each dialect; and where it declares it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.kv.dtype import ComputeDtype
from kvant.models.geometry.fields import Fields
from kvant.models.geometry.parameters import Weight, WeightKind
from kvant.models.geometry.weight_names import by_precedence, gptq_left_alone, names_chosen
from kvant.models.geometry.weight_recipe import Recipe, arguments, read_recipe
from kvant.models.load import load_model
from kvant.models.stored import Stored, declared_weights, refuse_unreadable
from kvant.plan.plan import Plan, PlanRequest
from tests.models import families
from tests.models.tiny_narrow import DIALECTS, build
from tests.planned import plan_of

CPU = DeviceFacts(DeviceKind.CPU)
_UP = "model.layers.0.mlp.up_proj"


def _change(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def _rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _widen(path: Path, layer: str) -> Tensor:
    """Gives one layer a weight of 16 bits instead of its narrow tensors."""
    wide = torch.randn(96, 64).bfloat16()

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{layer}.")]:
            del tensors[name]
        tensors[f"{layer}.weight"] = wide

    _rewrite(path, change)
    return wide


def _plan(path: Path) -> Plan:
    return plan_of(PlanRequest(str(path), CPU, dtype=ComputeDtype.BFLOAT16))


def _check(path: Path, numbers: dict[str, Tensor]) -> None:
    """Plans and loads a checkpoint, computing in bfloat16, which decodes it."""
    planned = _plan(path)
    assert planned.can_run, planned.warnings
    module = load_model(
        path,
        planned.target.kv,
        planned.target.geometry,
        planned.forward,
        device=torch.device("cpu"),
    )._module
    for name, weight in module.named_parameters():
        assert torch.equal(weight, numbers[name].bfloat16()), name


def _inside(config: dict[str, Any]) -> None:
    config["compression_config"] = config.pop("quantization_config")
    del config["compression_config"]["quant_method"]


def _inside_of_it(config: dict[str, Any]) -> None:
    config["compression_config"] = {"quantization_config": config.pop("quantization_config")}


def _other_spelling(config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_method"] = "compressed_tensors"


@pytest.mark.parametrize("change", [_inside, _inside_of_it, _other_spelling])
def test_former_names_of_a_declaration_are_read(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, "ct int4", num_hidden_layers=1)
    _change(path, change)
    _check(path, numbers)


@pytest.mark.parametrize("dialect", ["modelopt fp8", "modelopt nvfp4"])
def test_modelopts_own_file_alone_declares_weights(dialect: str, tmp_path: Path) -> None:
    path, numbers = build(tmp_path, dialect, num_hidden_layers=1)
    numbers[f"{_UP}.weight"] = _widen(path, _UP)
    declared = {**DIALECTS[dialect][0], "exclude_modules": ["lm_head", "*.up_proj"]}
    own = {"producer": {"name": "modelopt"}, "quantization": declared}
    (path / "hf_quant_config.json").write_text(json.dumps(own))
    _change(path, lambda config: config.pop("quantization_config"))
    _check(path, numbers)


@pytest.mark.parametrize(
    "declared",
    [
        {"dynamic": {r"-:.*\.up_proj$": {}}},
        {"dynamic": {r"-:.*\.up_proj$": {}, r".*\.up_proj$": {"group_size": 64}}},
        {
            "modules_in_block_to_quantize": [
                ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.down_proj"],
            ]
        },
    ],
)  # fmt: skip
def test_layers_that_gptq_does_not_quantise_are_wide(
    declared: dict[str, Any], tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, "gptq", num_hidden_layers=1)
    numbers[f"{_UP}.weight"] = _widen(path, _UP)
    _change(path, lambda config: config["quantization_config"].update(declared))
    _check(path, numbers)


def test_gptq_layers_have_fields_of_their_own() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    dynamic = {
        r"+:.*\.down_proj$": {"group_size": 32, "desc_act": True},
        r"model\.layers\.1\..*": {"group_size": 64},
        "-:.*": {},
    }
    found = declared_weights({"quantization_config": {**gptq, "dynamic": dynamic}})
    assert isinstance(found, Stored)
    down, up = found.scheme("model.layers.1.mlp.down_proj"), found.scheme(_UP.replace("0", "1"))
    assert down is not None
    assert up is not None
    assert (down.format.columns, down.reordered) == (32, True)
    assert (up.format.columns, up.reordered) == (64, False)
    assert found.scheme(_UP) is None
    assert found.scheme("lm_head") is None  # the last pattern matches it
    whole = declared_weights({"quantization_config": gptq})
    assert isinstance(whole, Stored)
    assert whole.scheme("lm_head") is not None
    assert gptq_left_alone(Fields({}))("lm_head")


def test_the_most_specific_target_decides_as_in_compressed_tensors() -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    groups = [
        (["Linear", "re:.*v_proj"], "first"),
        (["re:.*down_proj", "model.layers.0.mlp.up_proj"], "second"),
        (["re:.*layers.0.*", "re:.*v_proj"], "third"),
    ]
    owners = {target: value for targets, value in groups for target in targets}
    ordered = by_precedence(groups)
    for layer in range(2):
        for last in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{last}"
            expected = owners[match.match_targets(name, nn.Linear(1, 1), owners)[0]]
            assert next(v for test, v in ordered if test is None or test(name)) == expected, name


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("model.layers.0.self_attn.qkv_proj", "qkv"),
        ("re:.*self_attn.qkv_proj$", "qkv"),
        ("*.gate_up_proj", "gu"),
        ("re:.*gate.*", "g"),
    ],
)
def test_the_name_of_a_fused_product_means_its_parts(pattern: str, parts: str) -> None:
    chosen = names_chosen([pattern])
    names = {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "g": "mlp.gate_proj", "u": "mlp.up_proj", "d": "mlp.down_proj",
    }  # fmt: skip
    assert "".join(k for k, name in names.items() if chosen(f"model.layers.0.{name}")) == parts
    assert not names_chosen(["model.layers.1.self_attn.qkv_proj"])(
        "model.layers.0.self_attn.q_proj"
    )


@pytest.mark.parametrize(
    "dialect", ["ct int4", "awq", "gptq", "fp8 static", "autofp8 static", "modelopt fp8"]
)
def test_the_way_out_for_a_wide_layer_that_is_declared_narrow_works(
    dialect: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect, num_hidden_layers=1)
    numbers[f"{_UP}.weight"] = _widen(path, _UP)
    planned = _plan(path)
    assert not planned.can_run
    assert planned.audit is not None
    found = re.search(
        r"if it is meant to be wide, add (.*?) to quantization_config\.(\w+)",
        planned.audit.faults[0],
    )
    assert found is not None
    entry, field = found.groups()

    def change(config: dict[str, Any]) -> None:
        declared = config["quantization_config"]
        if field == "dynamic":
            declared[field] = json.loads(f"{{{entry}}}")
        else:
            declared[field] = [*declared.get(field, ()), json.loads(entry)]

    _change(path, change)
    _check(path, numbers)


def _declare_head(config: dict[str, Any]) -> None:
    config["quantization_config"]["ignore"] = []


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_tied_head_that_is_not_ignored_stays_the_embedding(
    is_stored: bool, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, "ct int4", num_hidden_layers=1, tie_word_embeddings=True)
    if is_stored:
        embedding = numbers["model.embed_tokens.weight"].clone()
        _rewrite(path, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    _change(path, _declare_head)
    _check(path, numbers)


def _as(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Gives an embedding or a head the narrow tensors of another layer."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{name}.weight", None)
        for short in ("weight_packed", "weight_scale", "weight_shape"):
            tensors[f"{name}.{short}"] = tensors[f"{_UP}.{short}"].clone()

    return change


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lm_head", "config.json ties the head to the embedding"),
        ("model.embed_tokens", "embeddings with narrow weights are read from GGUF files alone"),
    ],
)
def test_codes_of_embeddings_and_tied_heads_are_refused_in_planning_and_at_start(
    name: str, says: str, tmp_path: Path
) -> None:
    tied = name == "lm_head"
    path, _ = build(tmp_path, "ct int4", num_hidden_layers=1, tie_word_embeddings=tied)
    _rewrite(path, _as(name))
    _change(path, _declare_head if tied else lambda config: None)
    planned = _plan(path)
    assert not planned.can_run
    assert planned.audit is not None
    assert any(name in line and says in line for line in planned.audit.faults)
    with pytest.raises(BadCheckpoint, match=rf"{name}\.weight_packed") as refused:
        LLM(path, kv_cache_memory="1MiB")
    assert refused.value.ways_out


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"quant_method": "fp8", "weight_block_size": [64, 64, 3]}, "weight_block_size"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:[": {}}}, "broken pattern"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"bits": "4"}}}, "bits is '4'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["a"]}, "dynamic"),
        (
            {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [[1]]},
            "modules_in_block_to_quantize",
        ),
    ],
)
def test_declarations_of_a_wrong_kind_are_refused(declared: dict[str, Any], says: str) -> None:
    refused = refuse_unreadable({"quantization_config": declared})
    assert refused is not None
    assert says in refused.what


@pytest.mark.parametrize("strategy", ["group", "block"])
def test_a_strategy_without_its_size_is_refused(strategy: str) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    declared = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    refused = refuse_unreadable({"quantization_config": declared})
    assert refused is not None
    assert "is missing" in refused.what


_PATHS = [
    f"model.layers.{index}.{part}"
    for index in (1, 11)
    for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.gate", "mlp.shared_expert_gate")
]


@pytest.mark.parametrize("method", ["awq", "fp8"])
@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("gate", r".*gate"),
        ("mlp.gate", r".*mlp\.gate"),
        ("model.layers.1", r"model\.layers\.1\..*"),
        ("model.layers.1.self_attn", r"model\.layers\.1\.self_attn.*"),
        ("model.layers.*.mlp.gate", r".*mlp\.gate"),
        (r".*\.(?:gate|q_proj)", r".*\.(?:gate|q_proj)"),
        ("q_proj|k_proj", "nothing"),
        ("model.layers.1.mlp.gate_proj", r"model\.layers\.1\.mlp\.gate_proj"),
        ("_proj", ".*_proj"),
    ],
)
def test_a_layer_that_transformers_does_not_convert_is_left_alone(
    pattern: str, left: str, method: str
) -> None:
    """As `should_convert_module` of transformers 5.23 decides."""
    declared = {"quant_method": method, "bits": 4, "modules_to_not_convert": [pattern]}
    stored = declared_weights({"model_type": "llama", "quantization_config": declared})
    recipe = read_recipe({"quantization_config": declared})
    assert isinstance(stored, Stored)
    assert isinstance(recipe, Recipe)
    for name in _PATHS:
        is_narrow = re.fullmatch(left, name) is None
        assert (stored.scheme(name) is not None) is is_narrow, name
        weight = Weight(name, WeightKind.LINEAR, 128, 128)
        assert (recipe.stored_bytes(weight) is not None) is is_narrow, name


@pytest.mark.parametrize("pattern", ["self_attn", "layers.1.self_attn", "*.q_proj", "*q_proj"])
def test_parts_of_names_and_wildcards_leave_layers_alone_too(pattern: str) -> None:
    declared = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": [pattern]}
    stored = declared_weights({"model_type": "llama", "quantization_config": declared})
    assert isinstance(stored, Stored)
    assert stored.scheme("model.layers.1.self_attn.q_proj") is None
    assert stored.scheme("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("left_out", "dialect"),
    [
        (("strategy",), "ct int4"),
        (("strategy", "type"), "ct int4 zero points"),
        (("strategy",), "ct fp8 tensor"),
        (("type", "num_bits"), "ct int8"),
        (("strategy",), "ct nvfp4"),
    ],
)
def test_fields_that_are_left_out_are_as_in_compressed_tensors(
    left_out: tuple[str, ...], dialect: str, tmp_path: Path
) -> None:
    path, numbers = build(tmp_path, dialect, num_hidden_layers=1)

    def change(config: dict[str, Any]) -> None:
        weights = dict(config["quantization_config"]["config_groups"]["group_0"]["weights"])
        for field in left_out:
            del weights[field]
        config["quantization_config"]["config_groups"] = {
            "group_0": {"targets": ["Linear"], "weights": weights}
        }
        meant = QuantizationArgs(**weights)
        for field in left_out:
            found = arguments(Fields({"weights": weights}), "weights")
            assert found is not None
            assert found.raw(field) == getattr(meant, field)

    _change(path, change)
    _check(path, numbers)


@pytest.mark.parametrize(("size", "strategy"), [(None, "tensor"), (-1, "channel"), (64, "group")])
def test_a_group_size_says_the_strategy(size: int | None, strategy: str) -> None:
    weights = {} if size is None else {"group_size": size}
    found = arguments(Fields({"weights": weights}), "weights")
    assert found is not None
    assert found.text("strategy") == strategy == QuantizationArgs(**weights).strategy


def _lose_codes(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight_packed"]


def _widen_one(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.mlp.up_proj.")]:
        del tensors[name]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.randn(128, 128)


def _narrow_embedding(tensors: dict[str, Tensor]) -> None:
    del tensors["model.embed_tokens.weight"]
    for short in ("weight_packed", "weight_scale", "weight_shape"):
        found = tensors[f"model.layers.1.mlp.up_proj.{short}"]
        tensors[f"model.embed_tokens.{short}"] = found.clone()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_lose_codes, "model.layers.1.mlp.up_proj.weight_packed"),
        (_widen_one, "model.layers.1.mlp.up_proj.weight_packed"),
        (_narrow_embedding, "model.embed_tokens.weight_packed"),
    ],
)
def test_broken_layers_of_a_probed_family_are_refused_in_planning_and_at_start(
    change: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path
) -> None:
    families.build("stablelm", tmp_path, hidden_size=128, intermediate_size=128)
    declared, make = DIALECTS["ct int4"]
    generator = torch.Generator().manual_seed(0)

    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            stored, _ = make(tensors.pop(name), generator)
            layer = name.removesuffix(".weight")
            tensors.update({f"{layer}.{short}": one for short, one in stored.items()})

    _rewrite(tmp_path, narrow)
    _change(tmp_path, lambda config: config.update({"quantization_config": declared}))
    assert _plan(tmp_path).can_run
    _rewrite(tmp_path, change)
    planned = _plan(tmp_path)
    assert not planned.can_run
    assert planned.audit is not None
    assert any(says in line for line in planned.audit.faults)
    with pytest.raises(BadCheckpoint, match=re.escape(says)) as refused:
        LLM(tmp_path, kv_cache_memory="1MiB")
    assert refused.value.ways_out
