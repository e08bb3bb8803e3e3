"""Tests that `kvant plan` refuses scales with NaN, zero and other values that no engine takes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvant import LLM
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.kv.names import parse_compute_dtype
from kvant.plan import scale_values
from kvant.plan.plan import Plan, PlanRequest
from kvant.plan.plan_json import plan_json
from kvant.plan.scale_values import check_values
from kvant.weights.dialects import check_scales
from tests.cli.command import kvant
from tests.models.tiny_narrow import DIALECTS, build
from tests.models.tiny_quantized import build_quantized
from tests.planned import plan_of

GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
LAYER = "model.layers.1.mlp.up_proj"


def checked(path: Path, device: DeviceFacts = GPU) -> Plan:
    dtype = parse_compute_dtype("bfloat16", asked_by="test")
    return check_values(plan_of(PlanRequest(str(path), device, dtype=dtype)))


def change(path: Path, name: str, value: float) -> Tensor:
    """Gives one number of a tensor another value; returns the tensor."""
    tensors = load_file(path / "model.safetensors")
    flat = tensors[name].view(torch.uint8) if tensors[name].dtype is torch.uint8 else tensors[name]
    flat = flat.float().flatten()
    flat[-1] = value
    changed = flat.to(tensors[name].dtype).view(tensors[name].shape)
    save_file({**tensors, name: changed}, path / "model.safetensors", metadata={"format": "pt"})
    return changed


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_plan_refuses_exactly_the_scales_that_a_start_refuses(
    dialect: str, tmp_path: Path
) -> None:
    path, _ = build(tmp_path, dialect)
    whole = checked(path)
    assert whole.audit is not None
    assert whole.audit.refusal is None
    shorts = ("scale", "scales", "scale_inv", "scale_2")
    names = [
        one.name
        for one in whole.audit.tensors
        if one.layer == LAYER and one.name.endswith(shorts) and one.state.value == "used"
    ]
    assert names
    assert whole.audit.scales is not None
    assert whole.audit.scales.num_read >= len(names)
    before = (path / "model.safetensors").read_bytes()
    for name in names:
        codes = load_file(path / "model.safetensors")[name].dtype is torch.uint8
        for value in (255, 0, 254) if codes else (math.nan, math.inf, 0.0, -0.0, -1.0, 1.0):
            changed = change(path, name, value)
            try:
                check_scales(name, changed)
                says = None
            except BadCheckpoint as fault:
                says = fault.what
            found = checked(path)
            assert found.can_run == (says is None), (name, value)
            if says is not None:
                assert any(says in line and "way out" in line for line in found.warnings)
            (path / "model.safetensors").write_bytes(before)


def test_larger_scales_than_a_plan_reads_are_left_to_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = build(tmp_path, next(iter(DIALECTS)))
    change(path, f"{LAYER}.weight_scale_inv", math.nan)
    monkeypatch.setattr(scale_values, "MOST_BYTES", 0)
    left = checked(path)
    assert left.can_run
    assert left.audit is not None
    assert left.audit.scales is not None
    assert left.audit.scales.num_read == 0
    assert plan_json(left)["weights"]["scales"]["num_left"] == left.audit.scales.num_left > 0
    with pytest.raises(BadCheckpoint, match="NaN"):
        LLM(path, kv_cache_memory="1MiB")


def test_the_command_shows_what_it_read_and_refuses(tmp_path: Path) -> None:
    path, _ = build(tmp_path, next(iter(DIALECTS)))
    assert "tensors were read" in kvant("plan", str(path)).out
    change(path, f"{LAYER}.weight_scale_inv", -1.0)
    said = kvant("plan", str(path)).out
    assert f"{LAYER}.weight_scale_inv" in said
    assert "zero or negative" in said
    assert "serve it:" not in said


def test_scales_of_the_cache_are_read_too(tmp_path: Path) -> None:
    path, _ = build_quantized(tmp_path)
    assert checked(path, DeviceFacts(DeviceKind.CPU)).can_run
    name = next(n for n in load_file(path / "model.safetensors") if n.endswith("k_scale"))
    change(path, name, math.nan)
    found = checked(path, DeviceFacts(DeviceKind.CPU))
    assert not found.can_run
    assert any(name in line for line in found.warnings)
