"""Checkpoints whose weights are quantised: what transformers may read, and what it must not do.

The weights are transformers' business (its quantisers decompress or run them). The KV cache is not:
compressed-tensors would attach fake quantisation to keys and values wherever the checkpoint has a
`kv_cache_scheme`, on top of what Kvant stores. So the scheme is taken out of the config that
transformers gets to see; Kvant read it long before, when it planned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from kvant.errors import BadCheckpoint, EngineFault, NotServable, WayOut

MODELOPT_FILE = "hf_quant_config.json"
_COMPRESSED_TENSORS = frozenset({"compressed-tensors", "compressed_tensors"})
_MODELOPT = frozenset({"modelopt", "modelopt_fp4", "modelopt_mixed"})
_HALF = (torch.float16, torch.bfloat16)
# Submodules that compressed-tensors hangs on an attention module whose KV it quantises.
_FOREIGN_KV = ("kv_cache", "impl")


def leave_weights_only(config: PreTrainedConfig, directory: Path) -> None:
    """Reduce the config's quantisation to that of weights, in place; none left means plain weights.

    Raises NotServable for weights that transformers cannot read: it would take their codes for
    numbers, in silence.
    """
    holder, declared = _declaration(config)
    if declared is None:
        _check_modelopt_file(directory)
        return
    method = str(declared.get("quant_method", ""))
    if method in _COMPRESSED_TENSORS:
        kept = {key: value for key, value in declared.items() if key != "kv_cache_scheme"}
        _set(holder, kept if kept.get("config_groups") else None)
    elif method in _MODELOPT or "producer" in declared:
        _check_modelopt(declared, directory / "config.json")
        _set(holder, None)
    elif method not in AUTO_QUANTIZATION_CONFIG_MAPPING and not _is_bitsandbytes(declared):
        raise NotServable(
            f"{directory / 'config.json'}: weights are quantised by {method or 'no named method'}",
            why="transformers has no reader for such weights",
            ways_out=(WayOut("take the model's unquantised weights"),),
        )


def decode_weights(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Decode compressed-tensors' weights now, once, into the dtype that the model computes in.

    Left alone they would be decoded in the first forward, and activations quantised and decoded
    again in every one. The model computes as its dtype says; only its weights are as coarse as
    the checkpoint's. What transformers has decoded is in bfloat16, whatever was asked for.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None:  # there was none, or it has decoded all it had
        for parameter in model.parameters():
            if parameter.dtype in _HALF:
                parameter.data = parameter.data.to(compute)
        return
    compressor: Any = getattr(quantizer, "compressor", None)
    if compressor is None:
        return
    compressor.decompress_model(model)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and hasattr(module, "quantization_scheme"):
            del module.quantization_scheme
            module.__dict__.pop("forward", None)  # the wrapper that quantises activations


def is_compressed(config: PreTrainedConfig) -> bool:
    """Whether compressed-tensors will read the weights."""
    declared: Any = getattr(config, "quantization_config", None)
    return isinstance(declared, dict) and declared.get("quant_method") in _COMPRESSED_TENSORS


def check_nothing_quantises_kv(model: nn.Module) -> None:
    """EngineFault if a weight quantiser has hung anything of its own on an attention module."""
    for name, module in model.named_modules():
        if not hasattr(module, "layer_idx"):
            continue
        found = [child for child, _ in module.named_children() if child in _FOREIGN_KV]
        if found or hasattr(module, "quantization_scheme"):
            raise EngineFault(
                f"the weight quantiser took hold of {name}: keys and values would be quantised "
                "twice"
            )


def _declaration(config: PreTrainedConfig) -> tuple[PreTrainedConfig, dict[str, Any] | None]:
    """The config that declares a quantisation (the whole or its text model), and what it says."""
    for holder in (config, config.get_text_config(decoder=True)):
        for key in ("quantization_config", "compression_config"):
            declared = getattr(holder, key, None)
            if declared is None:
                continue
            if not isinstance(declared, dict):
                declared = declared.to_dict()
            if key == "compression_config":  # compressed-tensors' former name
                delattr(holder, key)
                declared = {"quant_method": "compressed-tensors", **declared}
                holder.quantization_config = declared
            return holder, declared
    return config, None


def _set(holder: PreTrainedConfig, declared: dict[str, Any] | None) -> None:
    if declared is None:
        del holder.quantization_config
    else:
        holder.quantization_config = declared


def _is_bitsandbytes(declared: Mapping[str, Any]) -> bool:
    return bool(declared.get("load_in_8bit") or declared.get("load_in_4bit"))


def _check_modelopt_file(directory: Path) -> None:
    """ModelOpt writes a file of its own, sometimes with nothing in config.json."""
    path = directory / MODELOPT_FILE
    if not path.is_file():
        return
    try:
        declared = json.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise BadCheckpoint(f"{path} cannot be read", why=str(fault)) from None
    if isinstance(declared, dict):
        _check_modelopt(declared, path)


def _check_modelopt(declared: Mapping[str, Any], path: Path) -> None:
    """A checkpoint of which ModelOpt quantised the KV cache alone has plain weights."""
    quantization = declared.get("quantization", declared)
    algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
    if algorithm:
        raise NotServable(
            f"{path}: weights are quantised by ModelOpt as {algorithm}",
            why="transformers has no reader for ModelOpt's weights",
            ways_out=(WayOut("take the model's unquantised weights"),),
        )
