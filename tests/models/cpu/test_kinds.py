"""Experts, gated delta nets and both dtypes in the compiled forward, over bfloat16 checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvant.engine.llm import LLM
from kvant.models.quiet import quiet_transformers
from kvant.sampling.sampling_params import SamplingParams

_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3_next": (
        "Qwen3NextConfig", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 64},
    ),
}  # fmt: skip
NEW = 10
PROMPTS = [
    [random.Random(n).randrange(3, 256) for _ in range(length)]
    for n, length in enumerate((5, 40, 1))
]


def build(kind: str, path: Path) -> None:
    """A random checkpoint in bfloat16."""
    name, extra = KINDS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**_COMMON, **extra))
    for label, parameter in model.named_parameters():
        if "norm" in label:
            parameter.data += 0.1 * torch.randn_like(parameter)
    with quiet_transformers():
        model.to(torch.bfloat16).save_pretrained(path)


def generate(path: Path, dtype: str, **options: Any) -> tuple[LLM, list[list[int]]]:
    llm = LLM(
        str(path), dtype=dtype, max_num_seqs=3, kv_cache_memory="8MiB", max_model_len=128, **options
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    return llm, [list(one.token_ids) for one in llm.generate(PROMPTS, params)]


def theirs(path: Path, dtype: torch.dtype, texts: list[list[int]]) -> Tensor:
    """Logits in front of every generated token, of the whole text at once."""
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if dtype is torch.float64 and hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        found = [model(torch.tensor([text])).logits[0, -NEW - 1 : -1] for text in texts]
    return torch.cat(found).double()


def losses(exact: Tensor, tokens: Tensor) -> Tensor:
    """How far the logits of tokens are below the largest ones."""
    return exact.amax(-1) - exact.gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_both_dtypes_choose_the_tokens_of_float64_and_matrices_take_two_bytes(
    kind: str, tmp_path: Path
) -> None:
    build(kind, tmp_path)
    stored = (tmp_path / "model.safetensors").stat().st_size
    for dtype in ("float32", "bfloat16"):
        llm, found = generate(tmp_path, dtype)
        assert llm.planned.forward.name == "compiled"
        held = llm.engine.runner.model.num_weight_bytes  # type: ignore[attr-defined]
        assert held < 1.05 * stored
        assert abs(llm.planned.target.weights.bytes - held) < 0.05 * stored  # type: ignore[operator]
        read = llm.engine.runner.model.weight_bytes_of_step(1000)  # type: ignore[attr-defined]
        assert held - read == 2 * _COMMON["vocab_size"] * _COMMON["hidden_size"]
        texts = [prompt + new for prompt, new in zip(PROMPTS, found, strict=True)]
        exact = theirs(tmp_path, torch.float64, texts)
        lost = losses(exact, torch.tensor([token for new in found for token in new]))
        if dtype == "float32":
            assert lost.max() < 1e-4
        else:
            own = losses(exact, theirs(tmp_path, torch.bfloat16, texts).argmax(-1))
            assert lost.sum() <= 2 * own.sum() + 0.05


def test_experts_in_float32_over_bfloat16_matrices_are_batch_invariant(tmp_path: Path) -> None:
    build("qwen3_moe", tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    for dtype in ("float32", "bfloat16"):
        llm, together = generate(tmp_path, dtype, batch_invariant=True)
        assert llm.planned.forward.name == "compiled"
        for prompt, tokens in zip(PROMPTS, together, strict=True):
            (alone,) = llm.generate([prompt], params)
            assert list(alone.token_ids) == tokens


def test_a_checkpoint_with_a_float32_matrix_keeps_all_of_them_wide(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    llm, _ = generate(tmp_path, "float32")
    assert llm.planned.forward.matrices is None
    assert llm.engine.runner.model.num_weight_bytes > 1.9 * file.stat().st_size * 0.9  # type: ignore[attr-defined]
