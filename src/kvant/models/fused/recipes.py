"""The table of families that Kvant's own decoder runs: one recipe for each model_type. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvant.models.fused.recipe import (
    Activation,
    Angles,
    Attend,
    Block,
    FeedForward,
    Mixture,
    NormKind,
    Recipe,
    RouterKind,
)
from kvant.models.geometry.parameters import QKNorm

_LLAMA = Recipe("LlamaModel")
_HEADS = Attend(qk_norm=QKNorm.HEAD)
_ROW = Attend(qk_norm=QKNorm.ROW)

_QWEN_NEXT = Recipe(
    "Qwen3NextModel", NormKind.RMS_ONE, attention=replace(_HEADS, gated=True), partial=True,
    mixers=True,
    mixture=Mixture(
        renormalise="norm_topk_prob", rounded=True, shared="shared_expert",
        shared_gate="shared_expert_gate",
    ),
)  # fmt: skip

_GEMMA_BLOCK = Block(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # fmt: skip
_GEMMA_FORWARD = FeedForward(activation=Activation.GELU_TANH, field="hidden_activation")
_GEMMA3 = Recipe(
    "Gemma3TextModel", NormKind.RMS_ONE, _GEMMA_BLOCK, _HEADS, _GEMMA_FORWARD,
    embed_scale="embed_tokens.embed_scale", logits_cap="final_logit_softcapping",
    by_layer_type=True,
)  # fmt: skip

RECIPES: Mapping[str, Recipe] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, module_class="MistralModel", only={"layer_types": (None,)}),
    "qwen2": replace(_LLAMA, module_class="Qwen2Model"),
    "qwen3": replace(_LLAMA, module_class="Qwen3Model", attention=_HEADS),
    "mixtral": Recipe("MixtralModel", mixture=Mixture()),
    "qwen2_moe": Recipe(
        "Qwen2MoeModel",
        mixture=Mixture(
            renormalise="norm_topk_prob", rounded=True, shared="shared_expert",
            shared_gate="shared_expert_gate",
        ),
    ),
    "qwen3_moe": Recipe(
        "Qwen3MoeModel", attention=_HEADS,
        mixture=Mixture(renormalise="norm_topk_prob", rounded=True),
    ),
    "olmoe": Recipe(
        "OlmoeModel", attention=replace(_ROW, clip="clip_qkv"),
        mixture=Mixture(renormalise="norm_topk_prob", rounded=True),
    ),
    "gpt_oss": Recipe(
        "GptOssModel", NormKind.RMS_WIDE, attention=Attend(angles=Angles.ONCE),
        mixture=Mixture(
            router="router", kind=RouterKind.TOP_K_SOFTMAX, transposed=True, alternating=True,
            clamped=True,
        ),
    ),
    "gemma3_text": _GEMMA3,
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5_moe_text": replace(
        _QWEN_NEXT, module_class="Qwen3_5MoeTextModel",
        mixture=Mixture(rounded=True, shared="shared_expert", shared_gate="shared_expert_gate"),
    ),
    "qwen3_5_text": replace(_QWEN_NEXT, module_class="Qwen3_5TextModel", mixture=None),
}  # fmt: skip
"""By the model_type of the config, or of its text section."""


def recipe_of(model_type: str) -> Recipe | None:
    return RECIPES.get(model_type)
