"""Who decides how activations are rounded, and what the plan says of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import NotServable
from kvant.kv.dtype import ComputeDtype
from kvant.models.activations import with_activations
from kvant.models.forward_info import ForwardChoice, ForwardFacts
from kvant.models.geometry import read_geometry
from kvant.models.quantization import Activations, Quantization
from kvant.models.select import select_forward
from kvant.weights.format import MOST_DECODED

CONFIG = json.loads((Path(__file__).parents[1] / "configs" / "qwen3-8b.json").read_text())
GPU = DeviceFacts(DeviceKind.CUDA, "sm_90")
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def compressed(**inputs: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    group = {"weights": weights, "targets": ["Linear"]}
    if inputs:
        group["input_activations"] = {"num_bits": 8, "type": "float"} | inputs
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"a": group},
    }


INT4 = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


def facts_of(declared: dict[str, Any] | None = None, **options: Any) -> ForwardFacts:
    config = CONFIG if declared is None else CONFIG | {"quantization_config": declared}
    found = ForwardFacts(config, read_geometry(config), ComputeDtype.BFLOAT16, GPU)
    return replace(found, **options)


def choose(facts: ForwardFacts, asked: Activations | None = None) -> ForwardChoice:
    return with_activations(select_forward(facts), asked, facts)


@pytest.mark.parametrize(
    "declared", [BLOCKS, compressed(strategy="token", dynamic=True)], ids=["blocks", "token"]
)
def test_a_declaration_is_followed_and_a_flag_wins(declared: dict[str, Any]) -> None:
    facts = facts_of(declared)
    found = choose(facts)
    assert found.activations is Activations.FP8
    assert "the checkpoint declares 8-bit floats, dynamic" in found.activations_because
    exact = choose(facts, Activations.EXACT)
    assert exact.activations is None
    assert exact.activations_because == "16 bits, from --weight-activations exact"


@pytest.mark.parametrize(
    ("declared", "options", "why"),
    [
        (compressed(strategy="channel", dynamic=False), {}, "no products for such activations"),
        (compressed(strategy="tensor", dynamic=False, symmetric=False), {}, "no products for"),
        (compressed(strategy="tensor", dynamic=False), {"batch_invariant": True}, "on the batch"),
        (compressed(strategy="tensor", dynamic=True), {}, "no products for such activations"),
        (BLOCKS, {"batch_invariant": True}, "depend on the batch"),
        (BLOCKS, {"num_ranks": 2}, "ranks hold parts"),
        (BLOCKS, {"device": DeviceFacts(DeviceKind.CUDA, "sm_80")}, "8.9 on"),
        (BLOCKS, {"compute": ComputeDtype.FLOAT16}, "computes in float16"),
    ],
)
def test_a_declaration_that_cannot_be_followed_is_explained(
    declared: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    found = choose(facts_of(declared, **options))
    assert found.activations is None
    assert found.activations_because.startswith("16 bits, though the checkpoint declares")
    assert why in found.activations_because


def test_gpus_after_hopper_round() -> None:
    facts = facts_of(BLOCKS, device=DeviceFacts(DeviceKind.CUDA, "sm_100"))
    assert choose(facts).activations is Activations.FP8


MOE = json.loads((Path(__file__).parents[1] / "configs" / "qwen3-30b-a3b.json").read_text())


def test_experts_in_blocks_round_on_hopper_gpus() -> None:
    config = MOE | {"quantization_config": BLOCKS}
    facts = replace(facts_of(), config=config, geometry=read_geometry(config))
    assert choose(facts).activations is Activations.FP8
    assert choose(facts, Activations.FP8).activations is Activations.FP8
    ada = choose(replace(facts, device=DeviceFacts(DeviceKind.CUDA, "sm_89")))
    assert ada.activations is None
    assert "on Hopper GPUs, for weights in blocks of 128 x 128" in ada.activations_because
    config = MOE | {"quantization_config": compressed(strategy="token", dynamic=True)}
    rows = choose(replace(facts, config=config))
    assert "experts round activations on Hopper GPUs" in rows.activations_because


def test_memory_to_decode_experts_is_counted_where_they_are_decoded() -> None:
    config = MOE | {"quantization_config": BLOCKS}
    facts = replace(facts_of(), config=config, geometry=read_geometry(config))
    decoded = choose(facts, Activations.EXACT).extra_bytes
    linear = 2 * 2 * 2048 * 6144  # the largest weight of a linear layer, after decoding
    assert decoded - choose(facts).extra_bytes == 2 * MOST_DECODED - linear
    rounded = replace(facts, config=MOE, quantization=Quantization.FP8_DYNAMIC)
    assert choose(rounded).activations is Activations.FP8
    assert choose(rounded).extra_bytes == decoded


def test_a_plan_says_that_experts_are_not_rounded_by_token() -> None:
    facts = facts_of(quantization=Quantization.FP8_DYNAMIC)
    dense = choose(facts).activations_because
    assert "experts" not in dense
    moe = choose(replace(facts, config=MOE, geometry=read_geometry(MOE)))
    assert moe.activations_because == f"{dense}; products with experts take 16 bits"


def test_weights_without_a_declaration_take_16_bits() -> None:
    found = choose(facts_of(compressed()))
    assert (found.activations, found.activations_because) == (None, "")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (facts_of(), "the model's weights are not quantised"),
        (facts_of(INT4), "weights of int4 are multiplied with 16-bit activations"),
        (facts_of(quantization=Quantization.INT8), "weights of int8"),
        (facts_of(device=DeviceFacts(DeviceKind.CPU)), "on NVIDIA GPUs"),
    ],
)
def test_fp8_is_refused_where_it_is_not_offered(facts: ForwardFacts, why: str) -> None:
    with pytest.raises(NotServable) as caught:
        with_activations(ForwardChoice(None, stored=facts.stored), Activations.FP8, facts)
    assert why in str(caught.value.why)


@pytest.mark.parametrize("asked", [Quantization.FP8, Quantization.FP8_DYNAMIC])
def test_fp8_weights_take_rounded_activations(asked: Quantization) -> None:
    found = choose(facts_of(quantization=asked), Activations.FP8)
    assert found.activations is Activations.FP8
    if asked is Quantization.FP8_DYNAMIC:
        assert choose(facts_of(quantization=asked)).activations is Activations.FP8
        with pytest.raises(NotServable, match="contradicts"):
            choose(facts_of(quantization=asked), Activations.EXACT)


STATIC = compressed(strategy="tensor", dynamic=False)


@pytest.mark.parametrize(
    "facts",
    [
        facts_of(quantization=Quantization.FP8_DYNAMIC),
        facts_of(quantization=Quantization.FP8),
        facts_of(compressed(strategy="token", dynamic=True)),
        facts_of(STATIC),
    ],
    ids=["fp8_dynamic", "fp8", "by token", "by a stored scale"],
)
def test_sums_in_fewer_bits_run_by_name_alone(facts: ForwardFacts) -> None:
    assert choose(facts).activations is not Activations.FP8_FAST
    found = choose(facts, Activations.FP8_FAST)
    assert found.activations is Activations.FP8_FAST
    assert "sums in fewer bits than float32, from --weight-activations" in found.activations_because
    if found.stored is not None:
        assert not any(scheme.rounds_inputs for _, scheme in found.stored.groups)


def test_sums_in_fewer_bits_are_refused_for_weights_in_blocks() -> None:
    with pytest.raises(NotServable) as caught:
        choose(facts_of(BLOCKS), Activations.FP8_FAST)
    assert "added in float32 block by block" in str(caught.value.why)


@pytest.mark.parametrize(
    "declared",
    [
        STATIC,
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "fp8", "activation_scheme": "static"},
    ],
    ids=["compressed-tensors", "modelopt", "fp8"],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_declared_scales_are_read_and_used(declared: dict[str, Any], ranks: int) -> None:
    found = choose(facts_of(declared, num_ranks=ranks))
    assert found.activations is Activations.FP8_STATIC
    assert "by the scale that the checkpoint has for each layer" in found.activations_because
    assert "the checkpoint declares 8-bit floats, static" in found.activations_because
    assert found.stored is not None
    assert all(scheme.rounds_inputs for _, scheme in found.stored.groups)


@pytest.mark.parametrize("asked", [Activations.EXACT, Activations.FP8])
def test_a_flag_wins_over_declared_scales_which_stay_in_the_files(asked: Activations) -> None:
    found = choose(facts_of(STATIC), asked)
    assert found.activations is (None if asked is Activations.EXACT else asked)
    assert found.stored is not None
    assert not any(scheme.rounds_inputs for _, scheme in found.stored.groups)


def test_scales_that_no_file_has_cannot_be_asked_for() -> None:
    assert choose(facts_of(STATIC), Activations.FP8_STATIC).activations is Activations.FP8_STATIC
    with pytest.raises(NotServable) as caught:
        choose(facts_of(BLOCKS), Activations.FP8_STATIC)
    assert "does not have a scale of activations" in str(caught.value.why)


def test_decoded_weights_are_multiplied_as_the_plan_says() -> None:
    cpu = facts_of(STATIC, device=DeviceFacts(DeviceKind.CPU), compute=ComputeDtype.FLOAT32)
    found = with_activations(ForwardChoice(None), None, cpu)
    assert found.activations is None
    assert found.activations_because.startswith("float32, though the checkpoint declares 8-bit")
    assert "decoded" in found.activations_because
    assert with_activations(ForwardChoice(None), None, facts_of()).activations_because == ""
