"""Weight bytes counted from a config, against transformers and against published files."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.errors import BadCheckpoint
from kvant.kv.checkpoint.safetensors_header import read_headers
from kvant.kv.dtype import ComputeDtype
from kvant.models.geometry import read_draft_geometry, read_geometry
from kvant.models.geometry.weight_recipe import are_decoded
from kvant.models.weights import (
    WeightBytes,
    WeightSource,
    estimate_weight_bytes,
    read_stored_weights,
    weight_bytes_of,
)
from tests.models import configs, meta
from tests.models.configs import changed, published

FLOAT32 = ComputeDtype.FLOAT32


def estimate(config: dict[str, Any], compute: ComputeDtype | None = None) -> WeightBytes:
    return estimate_weight_bytes(config, read_geometry(config), compute=compute)


def elements(config: dict[str, Any]) -> float:
    """Elements that the estimate counts."""
    found = estimate(changed(config, quantization_config=...), FLOAT32).bytes
    assert found is not None
    return found / 4


@pytest.mark.parametrize("name", configs.TINY_NAMES)
def test_every_element_of_a_tiny_model_is_counted(name: str) -> None:
    config = configs.tiny(name)
    assert elements(config) == meta.num_elements(meta.build(config))


# transformers builds Gemma 3n's towers with timm, which is not among the tests' packages.
@pytest.mark.parametrize("name", [n for n in configs.PUBLISHED if n != "gemma-3n-e4b"])
def test_every_element_of_a_published_model_is_counted(name: str) -> None:
    config = published(name)
    assert elements(config) == meta.num_elements(meta.build(changed(config, architectures=...)))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-4b", 4_300_079_472),
        ("phi-3-mini-4k", 3_821_079_552),
        ("deepseek-v2-lite", 15_706_484_224),
        # The published 7,849,978,192 less K and V projections of the shared layers, which are in
        # the files but not in the model.
        ("gemma-3n-e4b", 7_849_978_192 - 15 * (2 * 512 * 2048 + 256)),
    ],
)
def test_elements_are_those_of_the_published_files(name: str, parameters: int) -> None:
    assert elements(published(name)) == parameters


def test_bytes_are_elements_times_the_configs_dtype() -> None:
    found = estimate(published("llama-3.1-70b"))
    assert found == WeightBytes(141_107_412_992, WeightSource.ESTIMATED, found.reason)


def test_another_compute_dtype_changes_the_bytes_in_memory() -> None:
    config = published("llama-3.1-70b")
    assert estimate(config, FLOAT32).bytes == 2 * 141_107_412_992


def test_mxfp4_experts_are_counted_with_their_scales() -> None:
    # model.safetensors.index.json of openai/gpt-oss-20b: total_size 13761264768
    assert estimate(published("gpt-oss-20b")).bytes == 13_761_264_768


def test_fp8_blocks_of_deepseek_v3_are_counted_with_their_scales() -> None:
    # Index of deepseek-ai/DeepSeek-V3: 688586727753. It holds layer 61 too (MTP), which is not
    # loaded: one more sparse layer, a projection of 2 x 7168 to 7168, an embedding and a head.
    longer = estimate(published("deepseek-v3", num_hidden_layers=62)).bytes
    assert longer is not None
    mtp = 2 * 2 * 7168 * 7168 + 2 * 2 * 129280 * 7168
    assert longer + mtp == pytest.approx(688_586_727_753, rel=2e-4)


def _linear_bytes(config: dict[str, Any], recipe: dict[str, Any]) -> int:
    """Bytes of all Linear matrices of the decoder under a recipe, in a bfloat16 model."""
    model = meta.build(changed(config, architectures=...))
    linear: int = sum(
        module.weight.numel()
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear" and name != "lm_head"
    )
    whole = estimate(changed(config, quantization_config=...)).bytes
    stored = estimate(changed(config, quantization_config=recipe)).bytes
    assert whole is not None
    assert stored is not None
    return stored - (whole - 2 * linear)


_WEIGHTS_INT4 = {
    "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "bits_per_element"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + (16 + 4) / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + (16 + 4) / 64),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4 + 8 / 16),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, 4 + 8 / 16),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS_INT4}},
            },
            4 + 16 / 128,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "ignore": ["lm_head"],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {
                            "num_bits": 4, "type": "float", "strategy": "tensor_group",
                            "group_size": 16,
                        },
                    }
                },
            },
            4 + 8 / 16,
        ),
    ],
)  # fmt: skip
def test_quantised_matrices_are_counted_with_their_scales(
    recipe: dict[str, Any], bits_per_element: float
) -> None:
    config = published("llama-3.1-8b")
    elements_of_matrices = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    expected = elements_of_matrices * bits_per_element / 8
    if recipe["quant_method"] == "gptq":
        expected += 32 * 4 * (6 * 4096 + 14336)  # an int32 per column: which group it is in
    # Per-tensor scales are a few bytes a matrix.
    assert _linear_bytes(config, recipe) == pytest.approx(expected, rel=1e-6)


def test_modules_that_a_recipe_ignores_keep_their_dtype() -> None:
    config = published("llama-3.1-8b")
    plain = estimate(config).bytes
    for ignored in (["re:model.*"], ["model.layers.*"], [f"model.layers.{i}" for i in range(32)]):
        recipe = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ignored,
            "config_groups": {"g": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            }},
        }  # fmt: skip
        assert estimate(changed(config, quantization_config=recipe)).bytes == plain
    assert plain is not None
    down = changed(recipe, ignore=["re:.*down_proj$"])
    saved = plain - (estimate(changed(config, quantization_config=down)).bytes or 0)
    attention = 4096 * 4096 * 2 + 4096 * 1024 * 2
    columns = 2 * 4096 + 2 * 1024 + 2 * 14336  # one float16 scale each
    assert saved == 32 * (attention + 2 * 4096 * 14336 - 2 * columns)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
        ({}, "None"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": 5}, "quant_method is 5"),
        ([], "quantization_config is []"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["re:("]}, "unterminated"),
    ],
)
def test_a_recipe_without_closed_form_is_null_with_its_reason(recipe: Any, reason: str) -> None:
    found = estimate(published("llama-3.1-8b", quantization_config=recipe))
    assert (found.bytes, found.source) == (None, None)
    assert reason in found.reason


def test_an_unknown_tower_is_null_with_its_reason() -> None:
    config = published("gemma-3n-e4b")
    config["vision_config"]["architecture"] = "mobilenetv6"
    found = estimate(config)
    assert (found.bytes, found.source) == (None, None)
    assert "'mobilenetv6'" in found.reason


def test_a_drafter_is_counted_without_the_matrices_it_borrows() -> None:
    # safetensors total of z-lab/Qwen3.6-35B-A3B-DFlash: 385906176 bfloat16 numbers
    config = published("dflash-qwen3.6-35b-a3b")
    target = read_geometry(
        published(
            "qwen3.5-27b",
            text_config={
                **published("qwen3.5-27b")["text_config"],
                "hidden_size": 2048, "num_hidden_layers": 40, "layer_types": None,
            },
        )
    )  # fmt: skip
    geometry, _ = read_draft_geometry(config, target)
    assert estimate_weight_bytes(config, geometry).bytes == 2 * 385_906_176


def test_a_speculators_drafter_is_null_with_its_reason() -> None:
    config = published("speculator-dflash-qwen3-8b")
    geometry, _ = read_draft_geometry(config, read_geometry(published("qwen3-8b")))
    found = estimate_weight_bytes(config, geometry)
    assert (found.bytes, found.source) == (None, None)
    assert "speculators" in found.reason


def write_weights(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """A safetensors file of zeros: (dtype, bytes) by name, one-dimensional."""
    sizes = {"BF16": 2, "F32": 4, "U8": 1}
    header, begin = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {
            "dtype": dtype, "shape": [size // sizes[dtype]], "data_offsets": [begin, begin + size],
        }  # fmt: skip
        begin += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(begin))


def of(directory: Path, config: dict[str, Any], compute: ComputeDtype | None = None) -> WeightBytes:
    stored = read_stored_weights(directory, config, read_headers(directory))
    return weight_bytes_of(stored, config, read_geometry(config), compute=compute)


def test_headers_are_preferred_to_the_estimate(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", {"a": ("BF16", 24), "b": ("F32", 8)})
    found = of(tmp_path, published("llama-3.1-8b"))
    assert (found.bytes, found.source) == (32, WeightSource.HEADERS)


def test_floats_from_headers_become_the_compute_dtype(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", {"a": ("BF16", 24), "b": ("F32", 8)})
    config = published("llama-3.1-8b")
    assert of(tmp_path, config, FLOAT32).bytes == 56
    assert of(tmp_path, config, ComputeDtype.BFLOAT16).bytes == 28


def test_quantised_matrices_and_their_scales_keep_their_size(tmp_path: Path) -> None:
    tensors = {"a": ("U8", 100), "a_scale": ("F32", 8), "b": ("BF16", 24)}
    write_weights(tmp_path / "model.safetensors", tensors)
    config = published("llama-3.1-8b", quantization_config={"quant_method": "fp8"})
    assert of(tmp_path, config, FLOAT32).bytes == 100 + 8 + 48


def test_an_index_alone_gives_its_total(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = published("llama-3.1-8b")
    found = of(tmp_path, config)
    assert (found.bytes, found.source) == (16_060_522_496, WeightSource.HEADERS)
    assert of(tmp_path, config, FLOAT32).bytes == 2 * 16_060_522_496


def test_a_config_alone_is_estimated(tmp_path: Path) -> None:
    found = of(tmp_path, published("llama-3.1-8b"))
    assert (found.bytes, found.source) == (16_060_522_496, WeightSource.ESTIMATED)


def test_modelopts_own_file_is_read_with_the_config(tmp_path: Path) -> None:
    recipe = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(recipe))
    found = of(tmp_path, published("llama-3.1-8b")).bytes
    assert found == pytest.approx(16_060_522_496 - (8_030_261_248 - 2 * 128256 * 4096), rel=1e-3)


def test_broken_weight_files_are_an_error_not_an_estimate(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BadCheckpoint):
        of(tmp_path, published("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("method", "decoded"),
    [
        ("compressed-tensors", {"cpu", "sm_80", "sm_90"}),
        ("fp8", {"cpu", "sm_80"}),
        ("mxfp4", {"cpu"}),
        ("gptq", set()),
        (None, set()),
    ],
)
def test_codes_that_no_kernel_multiplies_are_counted_decoded(
    method: str | None, decoded: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = published("llama-3.1-8b", quantization_config={"quant_method": method})
    devices = {"cpu": DeviceFacts(DeviceKind.CPU)}
    devices |= {arch: DeviceFacts(DeviceKind.CUDA, arch) for arch in ("sm_80", "sm_90")}

    def find() -> set[str]:
        return {name for name, device in devices.items() if are_decoded(config, device)}

    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: object())
        assert find() == decoded
    if method == "mxfp4":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert find() == set(devices)
