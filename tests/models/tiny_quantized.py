"""A tiny Llama as compressed-tensors stores it: float8 weights, a KV scheme, calibrated KV scales.

Written tensor by tensor after the format's own documentation (float-quantized, one weight scale per
output channel), so that reading it back is not tested with the code that wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
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
