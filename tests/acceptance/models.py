"""Model directories for planning: config.json, side files, and safetensors headers with scales."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

FP8_SCHEME = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
}  # fmt: skip


def config(base: Mapping[str, Any] = LLAMA, **changes: Any) -> dict[str, Any]:
    body = copy.deepcopy(dict(base))
    body.update(changes)
    return body


def compressed_tensors(**scheme: Any) -> dict[str, Any]:
    """A quantization_config with a kv_cache_scheme; fields replace those of a static fp8 one."""
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {**FP8_SCHEME, **scheme},
    }


def modelopt(algo: Any, **more: Any) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt", "version": "0.43.0"},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": algo, **more},
    }


def write_model(
    directory: Path,
    body: Mapping[str, Any],
    *,
    tensors: Mapping[str, tuple[float, ...]] | None = None,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """config.json, other JSON files, and a model.safetensors of float32 tensors, if any are given."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(body))
    for name, content in (files or {}).items():
        (directory / name).write_text(json.dumps(content))
    if tensors is not None:
        header: dict[str, Any] = {}
        data = b""
        for name, values in tensors.items():
            raw = struct.pack(f"<{len(values)}f", *values)
            header[name] = {
                "dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)],
            }  # fmt: skip
            data += raw
        head = json.dumps(header).encode()
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    return directory


def cache_warnings(body: Mapping[str, Any]) -> list[str]:
    """Warnings of a plan but for those of weights, which these checkpoints lack."""
    return [line for line in body["warnings"] if " (numbers) " not in line]


def scales(
    num_layers: int = 4, *, names: tuple[str, str] = ("k_scale", "v_scale"), numel: int = 1
) -> dict[str, tuple[float, ...]]:
    """Scale tensors for every layer, and one weight so that the file looks like a model's."""
    found: dict[str, tuple[float, ...]] = {"model.embed_tokens.weight": (0.0,)}
    for layer in range(num_layers):
        for name in names:
            found[f"model.layers.{layer}.self_attn.{name}"] = (0.5 + layer,) * numel
    return found


GEMMA3: dict[str, Any] = config(
    architectures=["Gemma3ForCausalLM"],
    model_type="gemma3_text",
    num_hidden_layers=6,
    sliding_window=512,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
    head_dim=256,
    query_pre_attn_scalar=256,
)

GPT_OSS: dict[str, Any] = config(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_local_experts=4,
    num_experts_per_tok=2,
)

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

HYBRID: dict[str, Any] = config(
    architectures=["Qwen3NextForCausalLM"],
    model_type="qwen3_next",
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)

PHI3: dict[str, Any] = config(
    architectures=["Phi3ForCausalLM"],
    model_type="phi3",
    hidden_size=768,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=96,
    sliding_window=None,
    pad_token_id=0,  # else 32,000, which the vocabulary does not have
)

DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "block_size": 8,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 999, "target_layer_ids": [1, 2]},
}
