"""Layers of experts in plain torch against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kvant.models.fused.decoder import _feed_forward_of
from kvant.models.fused.experts import Experts, TorchExperts
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
}


def layer(family: str, dtype: torch.dtype) -> Any:
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_COMMON, **extra)
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    return model.requires_grad_(False).model.layers[0].mlp


def apply(mlp: Any, x: Tensor) -> Tensor:
    """As the decoder does."""
    experts = _feed_forward_of(mlp, "layer")
    assert isinstance(experts, Experts)
    found = TorchExperts().apply(x, x @ experts.router[0].T, experts)
    shared = experts.shared
    if shared is not None:
        gate, up = (x @ shared.gate_up.T).chunk(2, dim=-1)
        beside = (torch.nn.functional.silu(gate) * up) @ shared.down.T
        found = found + torch.sigmoid(x @ shared.gate.T) * beside
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 2, 50])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_that_of_transformers(family: str, tokens: int, dtype: torch.dtype) -> None:
    mlp = layer(family, dtype)
    x = torch.randn(tokens, 32, dtype=dtype)
    expected = mlp(x[None])[0]
    bound = 1e-5 if dtype is torch.float32 else 1e-6  # routers compute in float32 in any dtype
    torch.testing.assert_close(apply(mlp, x), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_logits_choose_the_experts_that_transformers_chooses(family: str) -> None:
    mlp = layer(family, torch.float64)
    mlp.gate.weight[3] = mlp.gate.weight[1]
    mlp.gate.weight[2] = mlp.gate.weight[0]
    x = torch.randn(20, 32, dtype=torch.float64)
    torch.testing.assert_close(apply(mlp, x), mlp(x[None])[0], atol=1e-6, rtol=1e-6)


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
