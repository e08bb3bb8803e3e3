"""Finds the transformers class for a config, and sets its attention and outputs: to load, probe and test."""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns transformers' factory for a config: of language models if it can, else of image-text models.

    If neither makes the class, returns that of language models, which raises the error.
    """
    # A language model of a multimodal config is made from its text section.
    kinds = {type(config), type(config.get_text_config(decoder=True))}
    is_text = all(kind in MODEL_FOR_CAUSAL_LM_MAPPING for kind in kinds)
    if not is_text and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def attending(config: PreTrainedConfig, name: str) -> str | dict[str, str]:
    """Returns `attn_implementation` for a config whose decoder attends by `name`.

    SAM's towers choose a class by the name, from a list of their own, so a model with one of them has eager
    towers.
    """
    parts = {part: getattr(config, part) for part in config.sub_configs}
    if not any(map(_has_sam, parts.values())):
        return name
    text = config.get_text_config(decoder=True)
    return {part: name if found is text else "eager" for part, found in parts.items()}


def _has_sam(config: PreTrainedConfig | None) -> bool:
    if config is None:
        return False
    inner = (getattr(config, part) for part in config.sub_configs)
    return config.model_type.endswith("sam_vision_model") or any(map(_has_sam, inner))


def settle_outputs(config: PreTrainedConfig) -> None:
    """Makes the forward of a config's model return an object, without outputs that only training uses."""
    for part in (config, config.get_text_config(decoder=True)):
        part.return_dict = True
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = False
