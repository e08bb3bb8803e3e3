"""Limits what transformers does with checkpoints whose weights are quantised.

transformers' quantisers may decompress or run the weights. But compressed-tensors would also attach
fake quantisation to keys and values if the checkpoint has a `kv_cache_scheme`, in addition to Kvant's
formats. So the scheme is removed from the config that transformers gets. Kvant read it before, when
it planned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvant.attention.need import DeviceFacts
from kvant.errors import BadCheckpoint, EngineFault
from kvant.kv.checkpoint.json_file import COMPARE_CONFIG
from kvant.models.geometry.weight_methods import (
    COMPRESSED_TENSORS,
    is_modelopt,
    method_of,
    refuse_weights,
    with_method,
)

_HALF = (torch.float16, torch.bfloat16)
# Submodules that compressed-tensors adds to an attention module to quantise its KV.
_FOREIGN_KV = ("kv_cache", "impl")


def check_weights(config: PreTrainedConfig, directory: Path, device: DeviceFacts) -> None:
    """Raises the error that `refuse_weights` returns, as the plan does.

    transformers would silently use codes as weights if it cannot read their format.
    """
    _, declared = _declaration(config)
    said = {} if declared is None else {"quantization_config": declared}
    refusal = refuse_weights(said, directory, device)
    if refusal is not None:
        raise refusal


def leave_weights_only(config: PreTrainedConfig, *, keep: bool = True) -> None:
    """Reduces the config's quantisation to that of weights, in place; removes it if nothing is left.

    keep: whether transformers will read the weights; otherwise it is removed.
    """
    holder, declared = _declaration(config)
    if declared is None:
        return
    if not keep:
        _set(holder, None)
        return
    if method_of(declared) in COMPRESSED_TENSORS:
        kept = {key: value for key, value in declared.items() if key != "kv_cache_scheme"}
        kept["quant_method"] = COMPRESSED_TENSORS[0]  # the spelling that transformers knows
        if kept.get("format") not in (None, "dense"):
            # Without it, transformers expects the tensors of weights that are not compressed yet.
            kept["quantization_status"] = "compressed"
        _set(holder, kept if kept.get("config_groups") else None)
    elif is_modelopt(declared):
        _set(holder, None)


def decode_weights(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Decodes compressed-tensors' weights once, to the compute dtype.

    Otherwise they would be decoded in the first forward, and activations would be quantised and
    decoded in every forward. Afterwards activations are not quantised. compressed-tensors may decode to
    bfloat16, so the weights are then converted to `compute`.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None:  # else there was none, or it has decoded all weights
        compressor: Any = getattr(quantizer, "compressor", None)
        if compressor is None:
            return
        compressor.decompress_model(model)
        for module in model.modules():
            is_product = isinstance(module, (nn.Linear, nn.Embedding))
            if is_product and hasattr(module, "quantization_scheme"):
                del module.quantization_scheme
                module.__dict__.pop("forward", None)  # the wrapper that quantises activations
    for parameter in model.parameters():
        if parameter.dtype in _HALF:
            parameter.data = parameter.data.to(compute)


def check_decoded(path: Path, model: nn.Module) -> None:
    """Raises BadCheckpoint if a module of the model's own code has codes as its numbers.

    transformers leaves codes there if the files have their scales under other names. Its quantisers have
    modules of their own.
    """
    for name, module in model.named_modules():
        if not type(module).__module__.startswith(("torch.nn.", "transformers.models.")):
            continue
        for short, parameter in module.named_parameters(recurse=False):
            if parameter.dtype.itemsize == 1:
                raise BadCheckpoint(
                    f"{path}: {name}.{short} holds codes ({parameter.dtype}) that nothing decodes",
                    why="transformers found no scales for them by the names it knows",
                    ways_out=(COMPARE_CONFIG,),
                )


def is_compressed(config: PreTrainedConfig) -> bool:
    """Returns whether compressed-tensors will read the weights."""
    declared: Any = getattr(config, "quantization_config", None)
    return isinstance(declared, dict) and declared.get("quant_method") in COMPRESSED_TENSORS


def check_nothing_quantises_kv(model: nn.Module) -> None:
    """Raises EngineFault if a weight quantiser has added submodules to an attention module."""
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
    """Returns the config that declares a quantisation (whole or text model's), and the declaration."""
    for holder in (config, config.get_text_config(decoder=True)):
        for key in ("quantization_config", "compression_config"):
            declared = getattr(holder, key, None)
            if declared is None:
                continue
            if not isinstance(declared, dict):
                declared = declared.to_dict()
            if key == "compression_config":  # compressed-tensors' former name
                delattr(holder, key)
                declared = with_method(declared)
                holder.quantization_config = declared
            return holder, declared
    return config, None


def _set(holder: PreTrainedConfig, declared: dict[str, Any] | None) -> None:
    if declared is None:
        del holder.quantization_config
    else:
        holder.quantization_config = declared
