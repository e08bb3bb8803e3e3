"""Layers of experts in plain torch against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvant.models.fused.experts import Experts, TorchExperts
from kvant.models.fused.feed_forward import activate
from kvant.models.fused.read import read_feed_forward
from kvant.models.fused.recipes import RECIPES
from kvant.models.fused.routing import Routing, Scoring, route

_COMMON: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_experts_per_tok": 2, "intermediate_size": 48,
    "moe_intermediate_size": 24, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 6, "norm_topk_prob": True}),
    "qwen3_moe, not renormalised": ("Qwen3Moe", {"num_experts": 6, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 5, "norm_topk_prob": False, "shared_expert_intermediate_size": 40},
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": 4}),
}


def layer(family: str, dtype: torch.dtype) -> Any:
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_COMMON, **extra)
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    for parameter in model.model.layers[0].mlp.parameters():
        if parameter.std() == 0:
            parameter.data.normal_()
    return model.requires_grad_(False).model.layers[0].mlp


def apply(mlp: Any, x: Tensor, family: str) -> Tensor:
    """As the decoder does."""
    recipe = RECIPES[family.split(",")[0]]
    config = transformers.CONFIG_MAPPING[family.split(",")[0]]()
    experts = read_feed_forward(mlp, recipe, config, torch.nn.functional.linear)
    assert isinstance(experts, Experts)
    logits = torch.nn.functional.linear(x, *experts.router)
    found = TorchExperts().apply(x, logits, experts)
    shared = experts.shared
    if shared is not None:
        assert shared.gate is not None
        gate, up = shared.dense.up(x).chunk(2, dim=-1)
        beside = shared.dense.down(activate(gate, shared.dense.activation) * up)
        found = found + torch.sigmoid(shared.gate(x)) * beside
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_that_of_transformers(family: str, tokens: int, dtype: torch.dtype) -> None:
    mlp = layer(family, dtype)
    x = torch.randn(tokens, 32, dtype=dtype)
    expected = mlp(x[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    bound = 1e-5 if dtype is torch.float32 else 1e-6  # routers compute in float32 in any dtype
    torch.testing.assert_close(apply(mlp, x, family), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])
def test_equal_logits_choose_the_experts_that_transformers_chooses(family: str) -> None:
    mlp = layer(family, torch.float64)
    mlp.gate.weight[3] = mlp.gate.weight[1]
    mlp.gate.weight[2] = mlp.gate.weight[0]
    x = torch.randn(20, 32, dtype=torch.float64)
    torch.testing.assert_close(apply(mlp, x, family), mlp(x[None])[0], atol=1e-6, rtol=1e-6)


def test_top_k_before_softmax_is_that_of_gpt_oss() -> None:
    config = transformers.GptOssConfig(
        hidden_size=16, num_local_experts=8, num_experts_per_tok=3, num_hidden_layers=1
    )
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    torch.manual_seed(0)
    router = GptOssTopKRouter(config).requires_grad_(False)
    router.weight.normal_()
    router.bias.normal_()
    logits, weights, ids = router(torch.randn(9, 16))
    found, chosen = route(logits, Routing(8, 3, Scoring.TOP_K_THEN_SOFTMAX, rounded=True))
    assert torch.equal(chosen, ids)
    assert torch.equal(found, weights)
