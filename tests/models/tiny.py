"""Tiny random models of every family Kvant runs, saved in transformers' format.

    path = build("qwen3", tmp_path)          # config.json, model.safetensors, ..
    facts = geometry("qwen3")                # written down by hand here, not read by Kvant

Weights are scaled so that attention matters and greedy texts do not stand still.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvant.kv.dtype import ComputeDtype
from kvant.kv.geometry import Attention, LayerGeometry, ModelGeometry

WINDOW = 12
VOCAB = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HALF_SLIDING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True, slots=True)
class Family:
    """A family's classes, what its config adds to the common facts, and its attention in layers.

    windows: by layer, None for full attention. shared: layers that read another's KV, and whose.
    head_dims: (K, V) by layer. num_kv_heads: by layer, empty where the config has one number.
    """

    config: str
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None,) * 4
    shared: Mapping[int, int] = field(default_factory=dict)
    head_dims: tuple[tuple[int, int], ...] = ((16, 16),) * 4
    sinks: tuple[bool, ...] = (False,) * 4
    softcap: float = 0.0
    num_kv_heads: tuple[int, ...] = ()


_SLIDES = (WINDOW, None) * 2

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": Family(
        "Qwen2Config", "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        windows=(None, None, WINDOW, WINDOW),
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}, head_dims=((32, 32),) * 4),
    "qwen3_moe": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True,
         "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "mistral": Family(
        "MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 16},
        windows=(WINDOW,) * 4,
    ),
    "ministral": Family(
        "MinistralConfig", "MinistralForCausalLM",
        {"sliding_window": WINDOW, "head_dim": 16, "layer_types": _HALF_SLIDING},
        windows=_SLIDES,
    ),
    "mixtral": Family(
        "MixtralConfig", "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        windows=(WINDOW,) * 4,
    ),
    "gemma2": Family(
        "Gemma2Config", "Gemma2ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW,
         "layer_types": _HALF_SLIDING, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 10.0},
        windows=_SLIDES, softcap=5.0,
    ),
    "gemma3": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
         "layer_types": _HALF_SLIDING},
        windows=_SLIDES,
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig", "Gemma3nForCausalLM",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _HALF_SLIDING,
         "num_kv_shared_layers": 2, "intermediate_size": [96] * 4, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4,
         "activation_sparsity_pattern": [0.0] * 4},
        windows=_SLIDES, shared={2: 0, 3: 1},
    ),
    "gemma4": Family(
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        {"head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW,
         "layer_types": _HALF_SLIDING, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": VOCAB, "num_global_key_value_heads": 2},
        windows=_SLIDES, shared={2: 0, 3: 1}, head_dims=((16, 16), (32, 32)) * 2,
    ),
    "gpt_oss": Family(
        "GptOssConfig", "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _HALF_SLIDING,
         "num_local_experts": 4, "num_experts_per_tok": 2},
        windows=_SLIDES, sinks=(True,) * 4,
    ),
    "phi3": Family(
        "Phi3Config", "Phi3ForCausalLM", {"num_attention_heads": 2, "hidden_size": 192,
                                         "num_key_value_heads": 1},
        head_dims=((96, 96),) * 4,
    ),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM"),
    "mimo_v2_flash": Family(
        "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM",
        {"head_dim": 24, "v_head_dim": 16, "sliding_window": WINDOW, "layer_types": _HALF_SLIDING,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        windows=_SLIDES, head_dims=((24, 16),) * 4, sinks=(True, False) * 2,
        num_kv_heads=(4, 2) * 2,
    ),
}  # fmt: skip


def config_of(name: str, **changes: Any) -> Any:
    """The family's transformers config."""
    family = FAMILIES[name]
    return getattr(transformers, family.config)(**{**_COMMON, **family.extra, **changes})


def make(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in float32; norms, biases and sinks are random too."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, family.model)(config_of(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.train(False)
    return model


def build(name: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save such a model as safetensors in `directory`/`name` and return that path."""
    path = directory / name
    make(name, seed=seed, **changes).save_pretrained(path)
    return path


def geometry(name: str, **changes: Any) -> ModelGeometry:
    """The geometry of `build(name)`, by hand."""
    family, facts = FAMILIES[name], {**_COMMON, **FAMILIES[name].extra, **changes}
    return ModelGeometry(
        architecture=family.model,
        model_type=name,
        layers=tuple(_layer(family, facts, index) for index in range(4)),
        dtype=ComputeDtype.FLOAT32,
        vocab_size=VOCAB,
        hidden_size=facts["hidden_size"],
        max_model_len=facts["max_position_embeddings"],
    )


def _layer(family: Family, facts: Mapping[str, Any], index: int) -> LayerGeometry:
    window = family.windows[index]
    kind = Attention.FULL if window is None else Attention.SLIDING
    return LayerGeometry(
        index=index,
        name=f"model.layers.{index}.self_attn",
        attention=Attention.SHARED if index in family.shared else kind,
        num_q_heads=facts["num_attention_heads"],
        num_kv_heads=(family.num_kv_heads or (facts["num_key_value_heads"],) * 4)[index],
        head_dim_k=family.head_dims[index][0],
        head_dim_v=family.head_dims[index][1],
        window=window,
        shared_with=family.shared.get(index),
        sinks=family.sinks[index],
        softcap=family.softcap,
    )
