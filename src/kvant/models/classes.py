"""The transformers class that runs a config, and what its forward gives: for loading, probing and tests."""

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
    """transformers' factory for a config: of language models first, else of models that see images too.

    Without a class in either it is that of language models, whose error says so.
    """
    kind = type(config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def settle_outputs(config: PreTrainedConfig) -> None:
    """Let the forward of a config's model return an object, and nothing that only training asks for."""
    for part in (config, config.get_text_config(decoder=True)):
        part.return_dict = True
        if hasattr(part, "output_router_logits"):
            part.output_router_logits = False
