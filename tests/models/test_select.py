"""Which forward runs a model, and the plan's reasons against the other forwards."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvant import LLM, SamplingParams
from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import NotServable
from kvant.kernels.cpu.vector import LANES
from kvant.kv.dtype import ComputeDtype
from kvant.models.cpu.info import FEWEST_ROWS, NORM_STEP
from kvant.models.cpu.product import OUTPUTS
from kvant.models.forward_info import ForwardFacts
from kvant.models.geometry.read import read_geometry
from kvant.models.quantization import Quantization
from kvant.models.select import FORWARDS, select_forward
from kvant.models.stored import read_stored
from tests.models import families, tiny

CONFIGS = Path(__file__).parents[1] / "configs"
CPU, GPU = DeviceFacts(DeviceKind.CPU), DeviceFacts(DeviceKind.CUDA, "sm_90")
ROCM = DeviceFacts(DeviceKind.ROCM, "gfx942")
F32, BF16, F16 = ComputeDtype.FLOAT32, ComputeDtype.BFLOAT16, ComputeDtype.FLOAT16


def facts(family: str, device: DeviceFacts, compute: ComputeDtype, **options: Any) -> ForwardFacts:
    config = tiny.config_of(family).to_dict()
    return ForwardFacts(config, tiny.geometry(family), compute, device, **options)


@pytest.mark.parametrize(
    ("family", "device", "compute", "name"),
    [
        ("llama", CPU, F32, "compiled"),
        ("mistral", CPU, F32, "compiled"),
        ("llama", CPU, BF16, "compiled"),
        ("llama", CPU, F16, "fused"),
        ("mixtral", CPU, BF16, "compiled"),
        ("qwen3", GPU, BF16, "few rows"),
        ("qwen3", GPU, F32, "fused"),
        ("qwen3", ROCM, BF16, "fused"),
        ("qwen3_moe", GPU, BF16, "few rows"),
        ("mixtral", GPU, F32, "fused"),
        ("qwen3_moe", CPU, F32, "fused"),
        ("gemma3", GPU, BF16, "few rows"),
        ("gpt_oss", GPU, BF16, "few rows"),
        ("gpt_oss", CPU, F32, "fused"),
        ("phi3", GPU, BF16, "few rows"),
        ("ministral", CPU, F32, "compiled"),
        ("gemma3n", GPU, BF16, "transformers"),
        ("gemma4", CPU, F32, "transformers"),
    ],
)
def test_the_fastest_forward_that_can_runs_the_model_and_faster_ones_say_why_not(
    family: str, device: DeviceFacts, compute: ComputeDtype, name: str
) -> None:
    choice = select_forward(facts(family, device, compute))
    assert choice.name == name
    faster = [info.name for info in FORWARDS[: [info.name for info in FORWARDS].index(name)]]
    assert [one.forward for one in choice.refused] == faster
    assert all(one.reason for one in choice.refused)


_OF_KV_ALONE = (
    {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
)


@pytest.mark.parametrize("declared", _OF_KV_ALONE, ids=lambda one: one["quant_method"])
@pytest.mark.parametrize(("device", "compute"), [(CPU, F32), (GPU, BF16)])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "gpt_oss", "gemma3"])
def test_a_declaration_of_the_kv_cache_alone_changes_no_forward(
    family: str, device: DeviceFacts, compute: ComputeDtype, declared: dict[str, Any]
) -> None:
    plain = facts(family, device, compute)
    config = {**plain.config, "quantization_config": declared}
    assert read_stored(config, device, compute) is None
    found = select_forward(replace(plain, config=config))
    assert found == select_forward(plain)
    on_gpu = replace(plain, config=config, device=GPU, quantization=Quantization.FP8)
    assert on_gpu.refuse_rounding is None


@pytest.mark.parametrize(("device", "name"), [(GPU, "fused"), (CPU, "compiled")])
def test_batch_invariance_takes_a_forward_that_promises_it(device: DeviceFacts, name: str) -> None:
    assert select_forward(facts("llama", device, BF16, batch_invariant=True)).name == name


def test_batch_invariance_that_no_forward_promises_is_refused_with_every_reason() -> None:
    with pytest.raises(NotServable, match="number of rows") as refused:
        select_forward(facts("gemma4", GPU, BF16, batch_invariant=True))
    assert len(refused.value.tried) == len(FORWARDS)
    assert select_forward(facts("gemma4", CPU, BF16, batch_invariant=True)).name == "transformers"


def test_experts_are_batch_invariant_in_the_fused_forward() -> None:
    for device, compute in ((GPU, BF16), (CPU, F32)):
        asked = facts("qwen3_moe", device, compute, batch_invariant=True)
        assert select_forward(asked).name == "fused"


def test_recurrences_are_batch_invariant_in_the_forwards_whose_kernels_pass_over_tokens() -> None:
    for name in ("qwen3.5-9b", "qwen3-next-80b-a3b"):
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        asked = ForwardFacts(config, read_geometry(config), BF16, GPU, batch_invariant=True)
        assert select_forward(asked).name == "fused"
        if name == "qwen3.5-9b":
            rounded = replace(asked, quantization=Quantization.INT8)
            assert select_forward(rounded).name == "fused"
        assert select_forward(replace(asked, device=CPU, compute=F32)).name == "transformers"
        with pytest.raises(NotServable, match="on a GPU") as refused:
            select_forward(replace(asked, compute=ComputeDtype.FLOAT64))
        assert any("float64" in one for one in refused.value.tried)


def test_a_model_that_can_only_be_planned_has_no_forward() -> None:
    asked = facts("llama", CPU, F32)
    planned = replace(asked, geometry=replace(asked.geometry, not_runnable="no recurrent state"))
    choice = select_forward(planned)
    assert choice.name is None
    assert {one.reason for one in choice.refused} == {"no recurrent state"}


def test_every_forward_can_be_made() -> None:
    for info in FORWARDS:
        if info.name != "few rows":  # whose module needs Triton
            assert callable(importlib.import_module(info.module).make)


def test_what_planning_knows_of_the_kernels_is_what_they_do() -> None:
    assert NORM_STEP == LANES
    assert OUTPUTS <= FEWEST_ROWS


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("mixtral", {"num_local_experts": 2}, "2 outputs"),
        ("mixtral", {"intermediate_size": 80}, "80 inputs"),
        ("qwen3_moe", {"mlp_only_layers": [1], "intermediate_size": 80}, "80 inputs"),
        ("qwen3_next", {"num_experts": 2}, "2 outputs"),
        ("qwen3_5_text", {"linear_num_value_heads": 1, "linear_num_key_heads": 1}, "16 inputs"),
        ("qwen3_5_text", {"linear_value_head_dim": 8}, "recurrent heads of 8 x 16"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 9}, "a convolution of 9 inputs"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "a convolution of 1 inputs"),
    ],
)
def test_shapes_without_a_kernel_of_compiled_code_run_in_another_forward(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    families.build(family, tmp_path, **changes)
    llm = LLM(tmp_path, device="cpu", dtype="float32", kv_cache_memory="1MiB")
    refused = {one.forward: one.reason for one in llm.planned.forward.refused}
    assert why in refused["compiled"]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    assert len(llm.generate([[3, 17, 5]], params)[0].token_ids) == 2


def test_tables_of_angles_are_counted_on_a_gpu_only() -> None:
    on_gpu = select_forward(facts("llama", GPU, F32))
    assert on_gpu.extra_bytes == 512 * 16 * 4
    assert select_forward(facts("llama", CPU, F32)).extra_bytes == 0
