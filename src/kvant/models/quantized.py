"""Checkpoints whose weights are quantised: what transformers may read, and what it must not do.

The weights are transformers' business (its quantisers decompress or run them). The KV cache is not:
compressed-tensors would attach fake quantisation to keys and values wherever the checkpoint has a
`kv_cache_scheme`, on top of what Kvant stores. So the scheme is taken out of the config that
transformers gets to see; Kvant read it long before, when it planned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvant.attention.need import DeviceFacts
from kvant.errors import EngineFault
from kvant.models.geometry.weight_methods import (
    COMPRESSED_TENSORS,
    is_modelopt,
    method_of,
    refuse_weights,
)

_HALF = (torch.float16, torch.bfloat16)
# Submodules that compressed-tensors hangs on an attention module whose KV it quantises.
_FOREIGN_KV = ("kv_cache", "impl")


def check_weights(config: PreTrainedConfig, directory: Path, device: DeviceFacts) -> None:
    """Raise what `refuse_weights` finds, as the plan does.

    transformers would take the codes of weights that it cannot read for numbers, in silence.
    """
    _, declared = _declaration(config)
    said = {} if declared is None else {"quantization_config": declared}
    refusal = refuse_weights(said, directory, device)
    if refusal is not None:
        raise refusal


def leave_weights_only(config: PreTrainedConfig, *, keep: bool = True) -> None:
    """Reduce the config's quantisation to that of weights, in place; none left means plain weights.

    keep: whether transformers is to read the weights; else nothing is left.
    """
    holder, declared = _declaration(config)
    if declared is None:
        return
    if not keep:
        _set(holder, None)
        return
    if method_of(declared) in COMPRESSED_TENSORS:
        kept = {key: value for key, value in declared.items() if key != "kv_cache_scheme"}
        _set(holder, kept if kept.get("config_groups") else None)
    elif is_modelopt(declared):
        _set(holder, None)


def decode_weights(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Decode compressed-tensors' weights now, once, into the dtype that the model computes in.

    Left alone they would be decoded in the first forward, and activations quantised and decoded
    again in every one. The model computes as its dtype says; only its weights are as coarse as
    the checkpoint's. Decoded weights may be bfloat16, regardless of the dtype asked for.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None:  # else there was none, or it has decoded all it had
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


def is_compressed(config: PreTrainedConfig) -> bool:
    """Whether compressed-tensors will read the weights."""
    declared: Any = getattr(config, "quantization_config", None)
    return isinstance(declared, dict) and declared.get("quant_method") in COMPRESSED_TENSORS


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
