"""A tiny Llama as compressed-tensors stores it: float8 weights, a KV scheme, calibrated KV scales. And
models whose weights are in other codes.

Written tensor by tensor after the format's own documentation (float-quantized, one weight scale per
output channel), so that reading it back is not tested with the code that wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models import tiny

K_SCALE, V_SCALE = 0.0625, 0.03
"""Scales of layer 0; later layers have one per cent more each. K and V differ, neither is 1."""

_E4M3_MAX = 448.0
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}


def scale(layer: int, side: str) -> float:
    return {"k": K_SCALE, "v": V_SCALE}[side] * 1.01**layer


def build_quantized(
    directory: Path, *, kv_scheme: bool = True, weights: bool = True
) -> tuple[Path, dict[str, Tensor]]:
    """Save the model in `directory`/"llama"; with it, its weights as they decode, in float32."""
    model = tiny.make("llama")
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        decoded[name] = value
        if not weights or value.dim() < 2 or "embed" in name or "lm_head" in name:
            stored[name] = value.contiguous()
            continue
        channel = value.abs().amax(1, keepdim=True) / _E4M3_MAX
        stored[name] = (value / channel).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = channel
        decoded[name] = stored[name].float() * channel
    for index in range(model.config.num_hidden_layers):
        for side in ("k", "v"):
            tensor = torch.tensor([scale(index, side)])
            stored[f"model.layers.{index}.self_attn.{side}_scale"] = tensor
    path = directory / "llama"
    path.mkdir(parents=True)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config["quantization_config"] = _declared(kv_scheme=kv_scheme, weights=weights)
    (path / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(path)
    return path, decoded


def build_fp8(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """The same of a Llama with DeepSeek's fp8 weights, one scale for a block, in a bfloat16 checkpoint."""
    path = tiny.build("llama", directory)
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, value in load_file(path / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = value.to(torch.bfloat16)
            decoded[name] = stored[name].float()
            continue
        stored[name] = (value * 8).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = torch.tensor([[0.125]])
        decoded[name] = stored[name].float() * 0.125
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3",
                "activation_scheme": "dynamic"}  # fmt: skip
    (path / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "quantization_config": declared})
    )
    return path, decoded


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def build_nvfp4(directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """A Llama with compressed-tensors' NVFP4 weights (nvfp4-pack-quantized), in a bfloat16 checkpoint.

    Two 4-bit codes a byte, the even column in the low half; a float8 scale for 16 columns; one
    float32 number for the whole matrix, which divides.
    """
    model = tiny.make("llama")
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if "_proj" not in name:
            stored[name] = value.to(torch.bfloat16)
            decoded[name] = stored[name].float()
            continue
        groups = value.view(value.shape[0], -1, 16)
        whole = torch.tensor([_E4M3_MAX * 6 / float(value.abs().max())])
        scales = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
        steps = scales.float()[..., None] / whole
        nearest = ((groups / steps).abs()[..., None] - _E2M1).abs().argmin(-1)
        codes = (nearest + 8 * (groups < 0)).to(torch.uint8).view(value.shape)
        at = name.removesuffix(".weight")
        stored[f"{at}.weight_packed"] = codes[:, 0::2] | (codes[:, 1::2] << 4)
        stored[f"{at}.weight_scale"] = scales
        stored[f"{at}.weight_global_scale"] = whole
        decoded[name] = (_E2M1[nearest] * groups.sign() * steps).view(value.shape)
    path = directory / "llama"
    path.mkdir(parents=True)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    codes_of = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
                "group_size": 16, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}  # fmt: skip
    declared = {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": codes_of,
                                      "format": "nvfp4-pack-quantized"}},
    }  # fmt: skip
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "quantization_config": declared,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    model.generation_config.save_pretrained(path)
    return path, decoded


def build_mxfp4(directory: Path) -> Path:
    """A gpt-oss whose experts are mxfp4 codes, any will do, in a bfloat16 checkpoint."""
    path = tiny.build("gpt_oss", directory)
    stored: dict[str, Tensor] = {}
    for name, value in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = value.to(torch.bfloat16)
            continue
        experts, rows, columns = value.shape
        blocks = (experts, columns, rows // 32)
        stored[f"{name}_blocks"] = torch.randint(0, 255, (*blocks, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.full(blocks, 122, dtype=torch.uint8)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(
            {**config, "dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
        )
    )
    return path


def _declared(*, kv_scheme: bool, weights: bool) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**_FLOAT8, "strategy": "channel", "dynamic": False},
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if weights else "dense",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group} if weights else {},
        "ignore": ["lm_head"],
        "kv_cache_scheme": {**_FLOAT8, "strategy": "tensor", "dynamic": False}
        if kv_scheme
        else None,
    }
