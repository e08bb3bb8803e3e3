"""A drafter that does not fit, or that Kvant would run wrongly, is refused before weights load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint, ConfigError, NotServable
from kvant.plan.plan import Plan, PlanRequest
from kvant.plan.plan_json import plan_json
from kvant.plan.speculative_config import parse_speculative_config
from tests.acceptance.models import compressed_tensors
from tests.planned import plan_of
from tests.speculative.pair import Pair
from tests.speculative.setting import planned, rewrite

WEIGHTS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def changed(pair: Pair, path: Path, **changes: Any) -> Path:
    """The drafter with other fields; a field in dflash_config is named dflash__FIELD."""
    path.mkdir()
    config = json.loads((pair.draft / "config.json").read_text())
    for name, value in changes.items():
        section = config["dflash_config"] if name.startswith("dflash__") else config
        name = name.removeprefix("dflash__")
        section.pop(name, None)
        if value is not ...:
            section[name] = value
    rewrite(path, config)
    save_file(load_file(pair.draft / "model.safetensors"), path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 32}, "hidden size of 64"),
        ({"vocab_size": 64}, "vocabulary of 128"),
        ({"num_target_layers": 30}, "4 layers"),
        ({"dflash__target_layer_ids": [0, 4]}, "4 layers"),
        ({"dflash__target_layer_ids": []}, "has no default"),
        ({"dflash__mask_token_id": 128}, "vocabulary of 128"),
        ({"dflash__mask_token_id": ...}, "mask_token_id is missing"),
        ({"block_size": ...}, "block_size is missing"),
        ({"intermediate_size": ...}, "intermediate_size is missing"),
        ({"num_attention_heads": ...}, "num_attention_heads is missing"),
        ({"dflash__is_neox_style": False}, "is_neox_style"),
        ({"dflash__use_aux_hidden_state": False}, "use_aux_hidden_state"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": WEIGHTS}, "weights are quantised"),
        ({"quantization_config": {"quant_method": "new"}}, "weights are quantised"),
        ({"intermediate_size": 64}, "shape"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "is missing"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "no part of"),
        ({"attention_bias": True}, "is missing"),
        ({"rope_theta": [1.5]}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "same rotary"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path = changed(pair, tmp_path / "d", **changes)
    with pytest.raises(ConfigError) as refused:
        planned(pair.target, path)
    assert isinstance(refused.value, BadCheckpoint | NotServable)
    assert says in str(refused.value)


def test_a_scheme_for_the_cache_alone_is_followed(pair: Pair, tmp_path: Path) -> None:
    path = changed(pair, tmp_path / "d", quantization_config=compressed_tensors())
    tensors = load_file(path / "model.safetensors")
    scales = {
        f"layers.{i}.self_attn.{side}_scale": torch.tensor([0.5]) for i in range(2) for side in "kv"
    }
    save_file({**tensors, **scales}, path / "model.safetensors")
    draft = planned(pair.target, path)
    assert {str(layer.k.dtype) for layer in draft.kv.layers if layer.k} == {"fp8_e4m3"}


def test_a_tensor_that_nothing_would_use_is_refused(pair: Pair, tmp_path: Path) -> None:
    path = changed(pair, tmp_path / "d")
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "mask_hidden": torch.zeros(64)}, path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="mask_hidden"):
        planned(pair.target, path)


def test_weights_that_are_codes_are_refused(pair: Pair, tmp_path: Path) -> None:
    path = changed(pair, tmp_path / "d")
    tensors = load_file(path / "model.safetensors")
    name = "layers.0.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="stored as I8"):
        planned(pair.target, path)


def test_a_plan_names_every_tensor_that_is_lost_or_misshapen(pair: Pair, tmp_path: Path) -> None:
    path = changed(pair, tmp_path / "d")
    whole = load_file(path / "model.safetensors")
    kinds = {re.sub(r"\d+", "N", name): name for name in whole}
    for name in kinds.values():
        shape = list(whole[name].shape)
        longer = torch.cat([whole[name], whole[name][:1]])
        cases: dict[str, dict[str, Tensor]] = {
            "is missing": {},
            f"make it {shape}": {name: longer},
            "holds codes": {name: torch.zeros(shape, dtype=torch.int8)},
        }
        for says, instead in cases.items():
            others = {one: tensor for one, tensor in whole.items() if one != name}
            save_file({**others, **instead}, path / "model.safetensors")
            found = with_drafter(pair, path)
            assert not found.can_run
            line = next(line for line in found.warnings if name in line)
            assert line.startswith("draft: ")
            assert says in line


def test_a_plan_shows_what_the_tensors_of_a_whole_drafter_are_for(
    pair: Pair, tmp_path: Path
) -> None:
    path = changed(pair, tmp_path / "d")
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "verifier_norm.weight": torch.ones(64)}, path / "model.safetensors")
    found = with_drafter(pair, path)
    assert found.can_run
    listed = plan_json(found, tensors=True)["draft"]["weights"]["tensors"]
    states = {one["tensor"]: one["state"] for one in listed}
    assert states.pop("verifier_norm.weight") == "unused"
    assert states == dict.fromkeys(tensors, "used")


def test_a_mask_embedding_in_a_pickle_is_refused_by_the_plan_and_its_way_out_works(
    pair: Pair, tmp_path: Path
) -> None:
    path = changed(pair, tmp_path / "d")
    torch.save({"embedding": torch.ones(1, 64)}, path / "mask_embedding.pt")
    found = with_drafter(pair, path)
    assert not found.can_run
    line = next(line for line in found.warnings if "pickle" in line)
    command = line.partition('python -c "')[2].rpartition('"')[0]
    subprocess.run([sys.executable, "-c", command], check=True)
    assert with_drafter(pair, path).warnings == ()
    save_file({"mask_embedding": torch.ones(65)}, path / "mask_embedding.safetensors")
    assert any("make it [64]" in line for line in with_drafter(pair, path).warnings)
    save_file({"other": torch.ones(64)}, path / "mask_embedding.safetensors")
    with pytest.raises(BadCheckpoint, match="holds no tensor mask_embedding"):
        with_drafter(pair, path)


def with_drafter(pair: Pair, path: Path) -> Plan:
    asked = parse_speculative_config({"method": "dflash", "model": str(path)})
    cpu = DeviceFacts(DeviceKind.CPU)
    return plan_of(PlanRequest(str(pair.target), cpu, speculative=asked))


def test_a_drafter_without_weights_can_be_planned_and_not_loaded(
    pair: Pair, tmp_path: Path
) -> None:
    path = changed(pair, tmp_path / "d")
    (path / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"no \.safetensors|no weights"):
        planned(pair.target, path)


def test_code_that_comes_with_a_drafter_is_ignored(pair: Pair, tmp_path: Path) -> None:
    path = changed(pair, tmp_path / "d", auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    (path / "dflash.py").write_text("raise SystemExit('never run')")
    assert planned(pair.target, path).path == path
