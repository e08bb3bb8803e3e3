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
    Pairing,
    Recipe,
    Rotated,
    RouterKind,
)
from kvant.models.geometry.parameters import QKNorm

_LLAMA = Recipe("LlamaModel")
_HEADS = Attend(qk_norm=QKNorm.HEAD)
_ROW = Attend(qk_norm=QKNorm.ROW)
_NEIGHBOURS = Attend(pairing=Pairing.NEIGHBOURS)
_LATENT = Attend(latent=True, interleaved="rope_interleave")
_COHERE = Attend(
    pairing=Pairing.NEIGHBOURS,
    angles=Angles.NEIGHBOURS,
    qk_norm=QKNorm.HEAD,
    qk_kind=NormKind.LAYER,
)

_QWEN_NEXT = Recipe(
    "Qwen3NextModel", NormKind.RMS_ONE, attention=replace(_HEADS, gated=True), partial=True,
    mixers=True,
    mixture=Mixture(
        renormalise="norm_topk_prob", rounded=True, shared="shared_expert",
        shared_gate="shared_expert_gate",
    ),
)  # fmt: skip

_BEHIND = Block(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = Block(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # fmt: skip
_BESIDE = Block(ffn_in=None, parallel=True)
_GRANITE = Block(residual_multiplier="residual_multiplier")

_PLAIN_RELU = FeedForward(up=("up_proj",), gated=False, activation=Activation.RELU_SQUARED)
_JOINED = FeedForward(up=("gate_up_proj",))
_GELU = FeedForward(activation=Activation.GELU_TANH, field="hidden_activation")

_QWEN_EXPERTS = Mixture(renormalise="norm_topk_prob", rounded=True)
_SIGMOID_EXPERTS = Mixture(
    kind=RouterKind.SIGMOID, renormalise="norm_topk_prob", wide=True, scale="routed_scaling_factor",
    groups=("num_group", "topk_group"), bias="e_score_correction_bias", shared="shared_experts",
)  # fmt: skip
_GRANITE_EXPERTS = Mixture("router", kind=RouterKind.TOP_K_SOFTMAX)
_GRANITE_FAMILY = Recipe(
    "GraniteModel", block=_GRANITE, embed_scale="embedding_multiplier",
    logits_divided="logits_scaling",
)  # fmt: skip

_GEMMA = Recipe(
    "GemmaModel", NormKind.RMS_ONE,
    feed_forward=FeedForward(activation=Activation.GELU_TANH, field="hidden_act"),
    embed_scale="embed_tokens.embed_scale",
)  # fmt: skip
_GEMMA2 = replace(
    _GEMMA, module_class="Gemma2Model", block=_AROUND, feed_forward=_GELU,
    logits_cap="final_logit_softcapping",
)  # fmt: skip

RECIPES: Mapping[str, Recipe] = {
    # Llama's layers with other names, biases, norms of heads or windows.
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, module_class="MistralModel", only={"layer_types": (None,)}),
    "ministral": replace(_LLAMA, module_class="MinistralModel"),
    "ministral3": replace(
        _LLAMA, module_class="Ministral3Model", attention=Attend(position_scale=True)
    ),
    "qwen2": replace(_LLAMA, module_class="Qwen2Model"),
    "qwen3": replace(_LLAMA, module_class="Qwen3Model", attention=_HEADS),
    "qwen2_vl_text": replace(_LLAMA, module_class="Qwen2VLTextModel"),
    "qwen2_5_vl_text": replace(_LLAMA, module_class="Qwen2_5_VLTextModel"),
    "qwen3_vl_text": replace(_LLAMA, module_class="Qwen3VLTextModel", attention=_HEADS),
    "internlm3": _LLAMA,
    "iquestcoder": replace(_LLAMA, attention=Attend(clip="clip_qkv")),
    "seed_oss": replace(_LLAMA, module_class="SeedOssModel"),
    "cwm": replace(_LLAMA, module_class="CwmModel"),
    "smollm3": replace(
        _LLAMA, module_class="SmolLM3Model", attention=Attend(rotated=Rotated.FLAGGED)
    ),
    "ernie4_5": replace(_LLAMA, module_class="Ernie4_5Model", attention=_NEIGHBOURS),
    "helium": Recipe("HeliumModel", NormKind.RMS_WIDE, attention=_NEIGHBOURS),
    "hunyuan_v1_dense": replace(
        _LLAMA, module_class="HunYuanDenseV1Model",
        attention=Attend(
            qk_norm=QKNorm.HEAD, q_norm="query_layernorm", k_norm="key_layernorm", norm_after=True
        ),
    ),
    "phi3": replace(
        _LLAMA, module_class="Phi3Model", attention=Attend(projections=("qkv_proj",)),
        feed_forward=_JOINED, partial=True,
    ),
    "arcee": replace(_LLAMA, module_class="ArceeModel", feed_forward=_PLAIN_RELU),
    "apertus": replace(
        _LLAMA, module_class="ApertusModel", attention=_HEADS,
        block=Block("attention_layernorm", ffn_in="feedforward_layernorm"),
        feed_forward=FeedForward(up=("up_proj",), gated=False, own="act_fn"),
        only={"hidden_act": (None, "xielu")},
    ),
    "granite": _GRANITE_FAMILY,
    "hyperclovax": replace(
        _LLAMA, module_class="HyperCLOVAXModel",
        block=Block(
            "input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2",
            residual_multiplier="residual_multiplier",
        ),
        embed_scale="embedding_multiplier", logits_times="logits_scaling",
    ),
    # Norms of other kinds and in other places.
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, module_class="Gemma3TextModel", attention=_HEADS, by_layer_type=True
    ),
    "vaultgemma": replace(_GEMMA2, module_class="VaultGemmaModel", block=Block(
        ffn_in="pre_feedforward_layernorm"
    )),
    "minicpm3": Recipe(
        "MiniCPM3Model", block=Block(residual_multiplier="residual_scale"),
        attention=Attend(latent=True), embed_scale="embed_tokens.embed_scale",
        logits_divided="logits_scaling",
    ),
    "youtu": Recipe("YoutuModel", attention=_LATENT),
    "olmo": Recipe("OlmoModel", NormKind.LAYER, attention=Attend(clip="clip_qkv")),
    "olmo2": Recipe("Olmo2Model", NormKind.RMS_WIDE, _BEHIND, _ROW),
    "olmo3": Recipe("Olmo3Model", NormKind.RMS_WIDE, _BEHIND, _ROW, by_layer_type=True),
    "exaone4": Recipe(
        "Exaone4Model", block=_BEHIND,
        attention=Attend(qk_norm=QKNorm.HEAD, rotated=Rotated.WINDOWED_IF_ANY),
    ),
    "glm": Recipe("GlmModel", attention=_NEIGHBOURS, feed_forward=_JOINED, partial=True),
    "glm4": Recipe(
        "Glm4Model", attention=_NEIGHBOURS, feed_forward=_JOINED, partial=True,
        block=Block(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "cohere": Recipe(
        "CohereModel", NormKind.LAYER, _BESIDE, _COHERE, logits_times="logit_scale"
    ),
    "cohere2": Recipe(
        "Cohere2Model", NormKind.LAYER, _BESIDE,
        Attend(
            pairing=Pairing.NEIGHBOURS, angles=Angles.NEIGHBOURS, rotated=Rotated.WINDOWED
        ),
        logits_times="logit_scale",
    ),
    "starcoder2": Recipe(
        "Starcoder2Model", NormKind.LAYER,
        feed_forward=FeedForward(
            up=("c_fc",), down="c_proj", gated=False, activation=Activation.GELU_TANH
        ),
    ),
    "stablelm": Recipe(
        "StableLmModel", NormKind.LAYER, Block(parallel="use_parallel_residual"), partial=True,
        only={"qk_layernorm": (None, False)},
    ),
    "gpt_neox": Recipe(
        "GPTNeoXModel", NormKind.LAYER, Block(parallel="use_parallel_residual"),
        Attend("attention", ("query_key_value",), "dense", by_head=True),
        FeedForward(
            up=("dense_h_to_4h",), down="dense_4h_to_h", gated=False, activation=Activation.GELU
        ),
        embedding="embed_in", last_norm="final_layer_norm", partial=True,
    ),
    "phi": Recipe(
        "PhiModel", NormKind.LAYER, _BESIDE,
        Attend(
            output="dense", qk_norm=QKNorm.HEAD, q_norm="q_layernorm", k_norm="k_layernorm",
        ),
        FeedForward(up=("fc1",), down="fc2", gated=False, activation=Activation.GELU_TANH),
        last_norm="final_layernorm", partial=True,
    ),
    "persimmon": Recipe(
        "PersimmonModel", NormKind.LAYER,
        attention=Attend(
            projections=("query_key_value",), output="dense", by_head=True, qk_norm=QKNorm.HEAD,
            q_norm="q_layernorm", k_norm="k_layernorm",
        ),
        feed_forward=FeedForward(
            up=("dense_h_to_4h",), down="dense_4h_to_h", gated=False,
            activation=Activation.RELU_SQUARED,
        ),
        last_norm="final_layernorm", partial=True,
    ),
    "nemotron": Recipe(
        "NemotronModel", NormKind.LAYER_ONE, feed_forward=_PLAIN_RELU, partial=True
    ),
    "jais2": Recipe("Jais2Model", NormKind.LAYER, feed_forward=_PLAIN_RELU),
    # Experts.
    "mixtral": Recipe("MixtralModel", mixture=Mixture()),
    "qwen2_moe": Recipe(
        "Qwen2MoeModel",
        mixture=replace(_QWEN_EXPERTS, shared="shared_expert", shared_gate="shared_expert_gate"),
    ),
    "qwen3_vl_moe_text": Recipe(
        "Qwen3VLMoeTextModel", attention=_HEADS, mixture=replace(_QWEN_EXPERTS, renormalise=True)
    ),
    "qwen3_moe": Recipe("Qwen3MoeModel", attention=_HEADS, mixture=_QWEN_EXPERTS),
    "mellum": Recipe(
        "MellumModel", attention=_HEADS, mixture=_QWEN_EXPERTS, by_layer_type=True
    ),
    "olmoe": Recipe(
        "OlmoeModel", attention=replace(_ROW, clip="clip_qkv"), mixture=_QWEN_EXPERTS
    ),
    "flex_olmo": Recipe("FlexOlmoModel", NormKind.RMS_WIDE, _BEHIND, _ROW, mixture=_QWEN_EXPERTS),
    "gpt_oss": Recipe(
        "GptOssModel", NormKind.RMS_WIDE, attention=Attend(angles=Angles.ONCE),
        mixture=Mixture(
            "router", kind=RouterKind.TOP_K_SOFTMAX, transposed=True, alternating=True, clamped=True
        ),
    ),
    "granitemoe": replace(
        _GRANITE_FAMILY, module_class="GraniteMoeModel",
        feed_forward=FeedForward(module="block_sparse_moe"), mixture=_GRANITE_EXPERTS,
    ),
    "granitemoeshared": replace(
        _GRANITE_FAMILY, module_class="GraniteMoeSharedModel",
        feed_forward=FeedForward(module="block_sparse_moe"),
        mixture=replace(
            _GRANITE_EXPERTS, shared="shared_mlp",
            shared_names=FeedForward(up=("input_linear",), down="output_linear"),
        ),
    ),
    # Some layers have Mamba2 or a short convolution instead of attention.
    "granitemoehybrid": replace(
        _GRANITE_FAMILY, module_class="GraniteMoeHybridModel", mixers=True,
        attention=Attend(rotated=Rotated.NAMED),
        feed_forward=FeedForward(module="block_sparse_moe"),
        mixture=replace(
            _GRANITE_EXPERTS, shared="shared_mlp",
            shared_names=FeedForward(up=("input_linear",), down="output_linear"),
        ),
    ),
    "bamba": Recipe(
        "BambaModel", block=Block(ffn_in="pre_ff_layernorm"),
        feed_forward=FeedForward(module="feed_forward"), last_norm="final_layernorm", mixers=True,
        partial=True,
    ),
    "lfm2": Recipe(
        "Lfm2Model", block=Block("operator_norm", ffn_in="ffn_norm"),
        attention=Attend(
            output="out_proj", qk_norm=QKNorm.HEAD, q_norm="q_layernorm", k_norm="k_layernorm"
        ),
        feed_forward=FeedForward(module="feed_forward", up=("w1", "w3"), down="w2"),
        last_norm="embedding_norm", mixers=True,
    ),
    "deepseek_v2": Recipe(
        "DeepseekV2Model",
        attention=Attend(latent=True, pairing=Pairing.NEIGHBOURS, angles=Angles.COMPLEX),
        mixture=Mixture(
            renormalise=False, wide=True, scale="routed_scaling_factor",
            groups=("num_group", "topk_group"), grouped=("topk_method", "group_limited_greedy"),
            by_best=True, shared="shared_experts",
        ),
    ),
    "deepseek_v3": Recipe("DeepseekV3Model", attention=_LATENT, mixture=_SIGMOID_EXPERTS),
    "glm4_moe_lite": Recipe("Glm4MoeLiteModel", attention=_LATENT, mixture=_SIGMOID_EXPERTS),
    "mistral4": Recipe(
        "Mistral4Model", attention=replace(_LATENT, position_scale=True),
        mixture=Mixture(
            renormalise="norm_topk_prob", scale="routed_scaling_factor",
            groups=("num_group", "topk_group"), shared="shared_experts",
        ),
    ),
    "dots1": Recipe("Dots1Model", attention=_HEADS, mixture=_SIGMOID_EXPERTS),
    "glm4_moe": Recipe("Glm4MoeModel", attention=_HEADS, mixture=_SIGMOID_EXPERTS, partial=True),
    "solar_open": Recipe("SolarOpenModel", mixture=_SIGMOID_EXPERTS, partial=True),
    "exaone_moe": Recipe(
        "ExaoneMoeModel", attention=Attend(qk_norm=QKNorm.HEAD, rotated=Rotated.WINDOWED_IF_ANY),
        mixture=_SIGMOID_EXPERTS,
    ),
    "hy_v3": Recipe(
        "HYV3Model", attention=_HEADS,
        mixture=Mixture(
            kind=RouterKind.SIGMOID, wide=True, scale="router_scaling_factor",
            bias="e_score_correction_bias", shared="shared_experts",
        ),
    ),
    "minimax_m2": Recipe(
        "MiniMaxM2Model", attention=_ROW, partial=True,
        mixture=Mixture(kind=RouterKind.SIGMOID, bias="e_score_correction_bias"),
    ),
    "hunyuan_v1_moe": Recipe(
        "HunYuanMoEV1Model",
        attention=Attend(
            qk_norm=QKNorm.HEAD, q_norm="query_layernorm", k_norm="key_layernorm", norm_after=True
        ),
        mixture=Mixture("gate.wg", rounded=True, shared="shared_mlp"),
    ),
    "ernie4_5_moe": Recipe(
        "Ernie4_5_MoeModel", attention=_NEIGHBOURS,
        mixture=Mixture(
            wide=True, bias="moe_statics.e_score_correction_bias", shared="shared_experts"
        ),
        only={"moe_norm_min": (None, 1e-12)},
    ),
    "qwen3_next": _QWEN_NEXT,
    "qwen3_5_moe_text": replace(
        _QWEN_NEXT, module_class="Qwen3_5MoeTextModel",
        mixture=Mixture(rounded=True, shared="shared_expert", shared_gate="shared_expert_gate"),
    ),
    "qwen3_5_text": replace(_QWEN_NEXT, module_class="Qwen3_5TextModel", mixture=None),
}  # fmt: skip
"""By the model_type of the config, or of its text section."""


def recipe_of(model_type: str) -> Recipe | None:
    """Returns the recipe of a family; None for a family that runs through transformers' modules."""
    return RECIPES.get(model_type)
