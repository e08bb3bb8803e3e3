"""Tiny models that carry a vision tower beside their text model, as released Gemmas do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PreTrainedModel,
)

from kvant.kv.geometry import ModelGeometry
from tests.models import tiny

NAMES = ("gemma3", "gemma4")
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


def _make(name: str) -> PreTrainedModel:
    text = tiny.config_of(name).to_dict()
    if name == "gemma3":
        return Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config=text,
                vision_config={**_VISION, "image_size": 28, "patch_size": 14},
                mm_tokens_per_image=4,
                image_token_index=120,
                boi_token_index=121,
                eoi_token_index=122,
            )
        )
    return Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=text,
            vision_config={**_VISION, "num_key_value_heads": 2, "head_dim": 16},
            audio_config=None,
            image_token_id=120,
            boi_token_id=121,
            eoi_token_id=122,
            audio_token_id=123,
            video_token_id=124,
        )
    )


def build(name: str, directory: Path) -> Path:
    """Save such a model in `directory`/`name` and return that path."""
    torch.manual_seed(0)
    path = directory / name
    _make(name).save_pretrained(path)
    return path


def geometry(name: str) -> ModelGeometry:
    """The text model's geometry; its layers lie one level deeper than in the text model alone."""
    alone = tiny.geometry(name)
    layers = tuple(
        dataclasses.replace(layer, name=layer.name.replace("model.", "model.language_model."))
        for layer in alone.layers
    )
    return dataclasses.replace(alone, layers=layers)
