"""config.json files of published models (tests/configs), and tiny ones of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent.parent / "configs"

DRAFTERS = ("dflash-qwen3-8b", "dflash-qwen3.6-35b-a3b", "speculator-dflash-qwen3-8b")
PUBLISHED = tuple(sorted(path.stem for path in CONFIGS.glob("*.json") if "dflash" not in path.stem))


def published(name: str, **changes: Any) -> dict[str, Any]:
    """A published config; changes replace fields, `...` removes one."""
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return changed(config, **changes)


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    merged = {**config, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LINEAR = {
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 12,
}  # fmt: skip
_MLA = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_PER_LAYER = {
    "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 128, "num_kv_shared_layers": 2,
    "layer_types": _ALTERNATING,
}  # fmt: skip
_GEMMA4 = {**_PER_LAYER, "global_head_dim": 32}
_TALL = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}

TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": ..., "attention_bias": True, "mlp_bias": True},
    "llama_mha": {"model_type": "llama", "num_key_value_heads": ..., "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "head_dim": ..., "use_sliding_window": False},
    "qwen2_window": {
        "model_type": "qwen2", "head_dim": ..., "use_sliding_window": True, "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "attention_bias": True},
    "qwen3_types": {
        "model_type": "qwen3", "use_sliding_window": True, "layer_types": _ALTERNATING,
    },
    "qwen3_default_head": {"model_type": "qwen3", "head_dim": ...},
    "qwen3_moe": {"model_type": "qwen3_moe", **_MOE, "mlp_only_layers": [1]},
    "qwen3_moe_window": {
        "model_type": "qwen3_moe", **_MOE, "use_sliding_window": True, "decoder_sparse_step": 2,
    },
    "mistral": {"model_type": "mistral"},
    "mistral_full": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "ministral": {"model_type": "ministral", "layer_types": _ALTERNATING},
    "ministral_window": {"model_type": "ministral"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "phi3": {"model_type": "phi3", "head_dim": ...},
    "olmo2": {"model_type": "olmo2", "head_dim": ..., "attention_bias": True},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss_types": {
        "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": _ALTERNATING[::-1],
    },
    "gemma2": {"model_type": "gemma2", "attn_logit_softcapping": 7.0},
    "gemma2_no_cap": {"model_type": "gemma2", "attn_logit_softcapping": None},
    "gemma2_default_cap": {"model_type": "gemma2", "attention_bias": True},
    "gemma3_text": {"model_type": "gemma3_text", "num_hidden_layers": 7},
    "gemma3_pattern": {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    "gemma3n_text": {"model_type": "gemma3n_text", **_PER_LAYER, "laurel_rank": 5},
    "gemma3n_wide": {
        "model_type": "gemma3n_text", **_PER_LAYER, "num_kv_shared_layers": 0,
        "intermediate_size": [96, 80, 64, 48], "altup_num_inputs": 3, "attention_bias": True,
    },
    "gemma4_text": {
        "model_type": "gemma4_text", **_GEMMA4, "num_kv_shared_layers": 0,
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, **_MOE,
        "top_k_experts": 2,
    },
    "gemma4_shared": {"model_type": "gemma4_text", **_GEMMA4, "use_double_wide_mlp": True},
    "gemma4_ungated": {
        "model_type": "gemma4_text", **_GEMMA4, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    },
    "gemma4_last": {
        "model_type": "gemma4_text", **_GEMMA4, "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
    },
    "gemma4_unified_text": {
        "model_type": "gemma4_unified_text", "global_head_dim": 32, "num_hidden_layers": 7,
    },
    "mimo": {
        "model_type": "mimo_v2_flash", "v_head_dim": 12, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 7,
    },
    "mimo_types": {
        "model_type": "mimo_v2_flash", "v_head_dim": 12, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "layer_types": _ALTERNATING, "attention_bias": True, "mlp_layer_types": ["sparse"] * 4,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", **_MLA, "q_lora_rank": None, "head_dim": ...},
    "deepseek_v3": {
        "model_type": "deepseek_v3", **_MLA, "q_lora_rank": 20, "attention_bias": True,
        "head_dim": ...,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", **_MOE, **_LINEAR, "mlp_only_layers": [2],
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **_LINEAR, "full_attention_interval": 2},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **_MOE, **_LINEAR},
}  # fmt: skip

NESTED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {"model_type": "gemma3_text"}, "mm_tokens_per_image": 1,
        "image_token_index": 126, "tie_word_embeddings": False,
        "vision_config": {
            **_TALL, "model_type": "siglip_vision_model", "num_attention_heads": 4,
            "image_size": 28, "patch_size": 14,
        },
    },
    "gemma4": {
        "text_config": {"model_type": "gemma4_text", **_GEMMA4}, "tie_word_embeddings": False,
        "image_token_id": 126, "video_token_id": 125, "audio_token_id": 124,
        "vision_config": {
            **_TALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
            "position_embedding_size": 32, "standardize": True,
        },
        "audio_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "output_proj_dims": 40,
        },
    },
    "gemma4_unified": {
        "text_config": {"model_type": "gemma4_unified_text", "global_head_dim": 32},
        "tie_word_embeddings": False,
        "image_token_id": 126, "video_token_id": 125, "audio_token_id": 124,
        "vision_config": {"mm_embed_dim": 20, "mm_posemb_size": 8, "output_proj_dims": 20},
        "audio_config": {},
    },
    "qwen3_5": {
        "text_config": {"model_type": "qwen3_5_text", **_LINEAR}, "vision_config": {},
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        "text_config": {"model_type": "qwen3_5_moe_text", **_MOE, **_LINEAR}, "vision_config": {},
    },
}  # fmt: skip


def tiny(name: str) -> dict[str, Any]:
    """A config that builds in milliseconds; every number in it is different where it can be."""
    if name in TINY:
        return changed(_COMMON, **TINY[name])
    config = NESTED[name]
    text = changed(_COMMON, **config["text_config"])
    return {"model_type": name, **config, "text_config": text}


TINY_NAMES = (*TINY, *NESTED)
