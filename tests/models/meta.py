"""Building transformers' models from a config.json's content, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvant.models.quiet import quiet_transformers


def build(config: Mapping[str, Any], *, device: str = "meta", attention: str = "eager") -> Any:
    """The model that transformers makes of a config, without tensors by default."""
    fields = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    with quiet_transformers(), torch.device(device):
        made = AutoConfig.for_model(config["model_type"], **fields)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            made, attn_implementation=attention, dtype=torch.float32
        )
    assert isinstance(model, PreTrainedModel)
    return model.train(False)


def num_elements(model: PreTrainedModel) -> int:
    """Elements of all that a checkpoint of the model holds."""
    saved = set(model.state_dict())
    buffers = sum(b.numel() for name, b in model.named_buffers() if name in saved)
    return buffers + sum(p.numel() for p in model.parameters())
