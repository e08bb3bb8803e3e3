"""Every option of a family's config that changes the own decoder's computation, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvant.attention.need import DeviceFacts, DeviceKind
from kvant.engine.llm import LLM
from kvant.kv.dtype import ComputeDtype, KVDtype
from kvant.models.forward_info import ForwardFacts
from kvant.models.fused.feed_forward import activate
from kvant.models.fused.recipe import Activation, activation_of
from kvant.models.fused.recipes import RECIPES
from kvant.models.geometry.parameters import QKNorm
from kvant.models.select import select_forward
from kvant.sampling.sampling_params import SamplingParams
from tests.attention import driver
from tests.models import families, loading, tiny
from tests.models.families import NUM_TOKENS, PROMPTS

BF16 = ComputeDtype.BFLOAT16

_MULTIPLIERS = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}  # fmt: skip
_GROUPS = {
    "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "n_shared_experts": 1,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.7, "mscale_all_dim": 0.9, "original_max_position_embeddings": 64,
}  # fmt: skip
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("seed_oss", {"attention_bias": True, "mlp_bias": True, "attention_out_bias": True}),
    ("arcee", {"mlp_bias": True, "attention_bias": True}),
    ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}),
    ("glm4_moe", {**_GROUPS, "use_qk_norm": True}),
    ("dots1", _GROUPS),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": True}),
    ("gpt_neox", {"use_parallel_residual": True}),
    ("granite", _MULTIPLIERS),
    ("granitemoeshared", _MULTIPLIERS),
    ("granitemoehybrid", {**_MULTIPLIERS, "position_embedding_type": "rope"}),
    ("granitemoehybrid", {**_MULTIPLIERS, "num_local_experts": 0, "position_embedding_type": None}),
    ("hyperclovax", {**_MULTIPLIERS, "use_post_norm": True}),
    (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    (
        "deepseek_v2",
        {
            **_GROUPS, "q_lora_rank": None, "topk_method": "group_limited_greedy",
            "rope_parameters": _YARN,
        },
    ),
    ("deepseek_v2", {**_GROUPS, "topk_method": "greedy", "attention_bias": True}),
    ("deepseek_v3", {**_GROUPS, "rope_parameters": _YARN, "attention_bias": True}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False}),
    ("minicpm3", {"scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 16}),
    (
        "mistral4",
        {
            **_GROUPS, "num_key_value_heads": 4, "qk_nope_head_dim": 8,
            "rope_parameters": {
                **_YARN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 8,
            },
        },
    ),
    ("olmo", {"clip_qkv": 0.5}),
    ("olmoe", {"clip_qkv": 0.5, "norm_topk_prob": True}),
    ("phi", {"qk_layernorm": True}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": False}),
    ("gpt_oss", {"attention_bias": True, "swiglu_limit": 0.5}),
)  # fmt: skip


@pytest.mark.parametrize(("family", "options"), OPTIONS)
def test_options_of_a_family_give_the_tokens_of_transformers(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families._EXTRA, family, {**families._EXTRA.get(family, {}), **options})
    found = families.compare(family, tmp_path / "model", quick=True)
    assert found.why is None
    assert found.forward in ("fused", "compiled")


@pytest.mark.parametrize(("family", "options"), [("ernie4_5_moe", {"moe_norm_min": 1.7})])
def test_options_that_the_decoder_does_not_compute_are_left_to_transformers(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families._EXTRA, family, {**families._EXTRA.get(family, {}), **options})
    found = families.compare(family, tmp_path / "model", quick=True)
    assert (found.why, found.forward) == (None, "transformers")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(RECIPES.keys() & set(families.FAMILIES)))
def test_every_family_of_the_table_gives_the_tokens_of_transformers(
    family: str, tmp_path: Path
) -> None:
    found = families.compare(family, tmp_path / "model", quick=True)
    assert found.why is None
    assert found.forward in ("fused", "compiled")


@pytest.mark.parametrize(
    ("family", "kibibytes", "preempted"),
    [
        ("gemma3_text", 136, False),  # all its layers have windows: pages come back first
        ("gpt_oss", 100, True),
        ("olmoe", 100, True),
        ("deepseek_v3", 40, True),
    ],
)
def test_texts_are_the_same_from_the_prefix_cache_and_after_preemption(
    family: str, kibibytes: int, preempted: bool, tmp_path: Path
) -> None:
    families.build(family, tmp_path / "model")
    expected, _ = families._transformers(tmp_path / "model")
    llm = LLM(
        tmp_path / "model", dtype="float32", kv_cache_dtype="float32", max_model_len=64,
        page_size=4, kv_cache_memory=kibibytes * 1024,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for attempt in range(2):
        engine, results = llm.engine, []
        for prompt in PROMPTS:
            engine.submit(list(prompt), params)
        while engine.has_work:
            results += [piece.result for piece in engine.step() if piece.result is not None]
        results.sort(key=lambda result: result.number)
        assert [list(result.token_ids) for result in results] == expected
        assert (engine.stats.num_preemptions > 0) == preempted
        if attempt:
            assert any(result.num_cached_tokens for result in results)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_moe", "llama"])
def test_logits_in_float64_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    path, geometry = tiny.build(family, tmp_path), tiny.geometry(family)
    plan = driver.plan(geometry.layers, KVDtype.FLOAT32, compute=ComputeDtype.FLOAT64)
    model = loading.load(path, plan, geometry)
    assert model.choice.name == "fused"
    expected = tiny.make(family).double()
    expected.set_experts_implementation("eager")
    ids = torch.tensor(PROMPTS[-1])
    found = families._logits(model)
    with torch.no_grad():
        wanted = expected(input_ids=ids[None]).logits[0]
    assert families._error(found, wanted) < 1e-5  # norms and stored rows are float32


def test_a_plain_recipe_is_llamas_up_to_names_biases_gates_and_norms_of_heads() -> None:
    plain = {name for name, recipe in RECIPES.items() if recipe.is_plain}
    assert {"llama", "qwen2", "qwen3", "seed_oss", "mixtral", "qwen3_5_text"} <= plain
    for name in ("gemma", "helium", "cohere2", "granite", "smollm3", "deepseek_v3", "olmo2"):
        assert not RECIPES[name].is_plain
    for recipe in RECIPES.values():
        plain_heads = recipe.attention.qk_norm is not QKNorm.ROW
        assert not recipe.is_plain or plain_heads


def test_activations_are_known_by_every_name_of_transformers() -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-4, 4, 33)
    for name in ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"):
        found = activation_of(name)
        assert found is not None
        torch.testing.assert_close(activate(x, found), ACT2FN[name](x))
    assert activation_of("mish") is None
    assert activation_of(Activation.SILU.value) is Activation.SILU


def test_multimodal_models_whose_decoder_would_finish_logits_are_left_to_transformers() -> None:
    config = tiny.config_of("gemma3").to_dict()
    geometry = tiny.geometry("gemma3")
    device = DeviceFacts(DeviceKind.CUDA, "sm_90")

    def chosen(**changes: Any) -> str | None:
        text = {k: v for k, v in {**config, **changes}.items() if v is not None}
        facts = ForwardFacts({"model_type": "gemma3", "text_config": text}, geometry, BF16, device)
        return select_forward(facts).name

    assert chosen() == "few rows"
    assert chosen(final_logit_softcapping=30.0) == "transformers"
    assert chosen(model_type="granite", logits_scaling=8.0) == "transformers"
    assert chosen(model_type="granite", logits_scaling=1.0) == "few rows"
