"""Models of about 100 million random parameters, saved in bfloat16 like published checkpoints."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

VOCAB = 32768

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.03, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


class RandomModel(Enum):
    """By name. Shapes are those of a family, with fewer and narrower layers."""

    EXPERTS = "qwen3-moe-98m"
    HYBRID = "qwen3.5-125m"


_CONFIGS: dict[RandomModel, tuple[str, dict[str, Any]]] = {
    RandomModel.EXPERTS: (
        "Qwen3MoeConfig",
        {"hidden_size": 512, "num_hidden_layers": 8, "head_dim": 64, "num_experts": 16,
         "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True},
    ),
    RandomModel.HYBRID: (
        "Qwen3_5TextConfig",
        {"hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 16, "head_dim": 128,
         "linear_num_key_heads": 8, "linear_num_value_heads": 8},
    ),
}  # fmt: skip


def save_random(model: RandomModel, place: Path) -> Path:
    """Saves the model, bfloat16, in a new directory in `place`; returns the directory."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from kvant.models.quiet import quiet_transformers

    name, fields = _CONFIGS[model]
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    with quiet_transformers():
        made = auto.from_config(
            getattr(transformers, name)(**_COMMON, **fields), dtype=torch.bfloat16
        )
        made.save_pretrained(place / model.value)
    return place / model.value
