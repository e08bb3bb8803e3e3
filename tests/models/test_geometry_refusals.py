"""Configs that make no sense: BadCheckpoint that names field and value, never a traceback."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.errors import BadCheckpoint
from kvant.kv.geometry import ModelGeometry
from kvant.models.geometry import read_draft_geometry, read_geometry
from kvant.models.geometry.families import FAMILIES
from kvant.models.weights import WeightBytes, estimate_weight_bytes
from tests.models.configs import DRAFTERS, PUBLISHED, changed, published, tiny


def refused(config: Any) -> str:
    with pytest.raises(BadCheckpoint) as caught:
        read_geometry(config)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_an_unknown_architecture_is_named_and_the_known_ones_are_listed() -> None:
    message = refused({"architectures": ["BloomForCausalLM"], "model_type": "bloom"})
    assert "'BloomForCausalLM'" in message.splitlines()[0]
    assert "'bloom'" in message.splitlines()[0]
    for family in FAMILIES:
        assert family.title in message


def test_a_known_model_without_a_language_head_is_refused() -> None:
    config = published("qwen3-8b", architectures=["Qwen3ForSequenceClassification"])
    assert "Qwen3ForSequenceClassification" in refused(config)


def test_a_config_that_names_nothing_is_refused() -> None:
    assert "names neither" in refused({})


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "qwen3.5-9b"])
def test_recurrences_that_compute_no_silu_are_refused(name: str) -> None:
    config = published(name)
    config.get("text_config", config)["hidden_act"] = "gelu"
    assert "hidden_act is 'gelu'" in refused(config)


@pytest.mark.parametrize("config", [None, [], "llama", 3])
def test_what_is_no_object_is_refused(config: Any) -> None:
    assert "no JSON object" in refused(config)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_pointed_to_its_flag(name: str) -> None:
    assert "--speculative-config" in refused(published(name))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ({"num_attention_heads": "32"}, "num_attention_heads is '32'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_attention_heads": 31.0}, "num_attention_heads is 31.0"),
        ({"hidden_size": 4100, "head_dim": ..., "model_type": "llama",
          "architectures": ["LlamaForCausalLM"]}, "num_attention_heads is 32"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is null"),
        ({"use_cache": None}, "use_cache is null"),
        ({"head_dim": -128}, "head_dim is -128"),
        ({"vocab_size": []}, "vocab_size is []"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        ({"use_sliding_window": 1}, "use_sliding_window is 1"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": ["full_attention"]}, "it has 1 entries for 36 layers"),
        ({"layer_types": ["chunked_attention"] * 36}, "'chunked_attention' is none of"),
        ({"layer_types": ["sliding_attention"] * 36}, "use_sliding_window is off"),
        ({"layer_types": "full_attention"}, "it must be a list of texts"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"torch_dtype": 16}, "torch_dtype is 16"),
        ({"per_layer_config": {"3": {"num_key_value_heads": 4}}}, "per_layer_config is"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures is 'Qwen3ForCausalLM'"),
        ({"model_type": ["qwen3"]}, "model_type is ['qwen3']"),
        ({"intermediate_size": "wide"}, "intermediate_size is 'wide'"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"intermediate_size": [1, "a"]}, "intermediate_size is [1, 'a']"),
        ({"hidden_act": 1}, "hidden_act is 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0"),
        ({"eos_token_id": [1, "a"]}, "eos_token_id is [1, 'a']"),
        ({"pad_token_id": 1.5}, "pad_token_id is 1.5"),
    ],
)  # fmt: skip
def test_a_field_that_makes_no_sense_is_named_with_its_value(
    changes: dict[str, Any], named: str
) -> None:
    assert named in refused(published("qwen3-8b", **changes))


def test_fields_of_a_nested_section_are_named_with_it() -> None:
    config = published("gemma-3-4b")
    config["text_config"]["num_hidden_layers"] = 0
    assert "text_config.num_hidden_layers is 0" in refused(config)
    assert "text_config is missing" in refused(changed(config, text_config=...))


@pytest.mark.parametrize(
    ("name", "field", "value", "named"),
    [
        ("gemma-4-31b", "num_kv_shared_layers", 60, "at least one must have KV of its own"),
        ("gemma-4-31b", "num_kv_shared_layers", 56, "reads KV that no layer before them writes"),
        ("gemma-4-31b", "num_global_key_value_heads", 5, "num_global_key_value_heads is 5"),
        ("gemma-4-31b", "use_bidirectional_attention", "all", "it keeps no KV cache"),
        ("gemma-4-31b", "per_layer_config", {"60": {}}, "layer indices below 60"),
        ("gemma-4-31b", "per_layer_config", {"3": {"skip": ["mlp"]}}, "per_layer_config.3.skip is"),
        ("gemma-3n-e4b", "intermediate_size", 0, "text_config.intermediate_size is 0"),
        ("gemma-3-4b", "sliding_window_pattern", "six", "sliding_window_pattern is 'six'"),
    ],
)
def test_gemmas_own_fields_are_checked(name: str, field: str, value: Any, named: str) -> None:
    config = published(name)
    config["text_config"][field] = value
    assert named in refused(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hybrid_layer_pattern": [0, 1]}, "it has 2 entries for 48 layers"),
        ({"hybrid_layer_pattern": [2] * 48}, "hybrid_layer_pattern is"),
        ({"swa_num_key_value_heads": 7}, "swa_num_key_value_heads is 7"),
        ({"v_head_dim": ...}, "v_head_dim is missing"),
    ],
)
def test_mimos_own_fields_are_checked(changes: dict[str, Any], named: str) -> None:
    assert named in refused(published("mimo-v2-flash", **changes))


def test_later_mimo_models_must_say_what_no_class_fills_in() -> None:
    config = published("mimo-v2-flash", model_type="mimo_v2", architectures=["MiMoV2ForCausalLM"])
    assert read_geometry(config).not_runnable is not None
    assert "hybrid_layer_pattern" in refused(changed(config, hybrid_layer_pattern=...))
    assert "swa_num_key_value_heads" in refused(changed(config, swa_num_key_value_heads=...))


def test_a_hybrid_without_a_layer_that_attends_cannot_run() -> None:
    config = published("qwen3-next-80b-a3b")
    assert read_geometry(config).not_runnable is None
    recurrent = {**config, "layer_types": ["linear_attention"] * config["num_hidden_layers"]}
    assert "none of its layers attends" in str(read_geometry(recurrent).not_runnable)


def test_groups_of_one_expert_are_planned_and_cannot_run() -> None:
    """DeepSeek-V3's class has 8 groups by default, so small configs that leave n_group out have them."""
    config = published("deepseek-v3", n_routed_experts=8, topk_group=1, n_group=...)
    reason = str(read_geometry(config).not_runnable)
    assert "n_group is 8 for 8 experts" in reason
    assert read_geometry({**config, "n_group": 4}).not_runnable is None
    assert read_geometry({**config, "first_k_dense_replace": 61}).not_runnable is None


@pytest.mark.parametrize("field", ["kv_lora_rank", "qk_rope_head_dim"])
def test_mla_needs_its_latent(field: str) -> None:
    assert f"{field} is missing" in refused(published("deepseek-v3", **{field: ...}))


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "full_attention", "sliding_attention", "re:(", "mxfp4", "Linear"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def _places(config: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of a config, nested ones too."""
    found = []
    for key, value in config.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += _places(value, (*path, key))
    return found


@st.composite
def broken_configs(draw: st.DrawFn, names: tuple[str, ...]) -> dict[str, Any]:
    """A published config in which a few fields are something else, or gone."""
    config = copy.deepcopy(published(draw(st.sampled_from(names))))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(config)))
        section = config
        for key in path[:-1]:
            section = section[key]
        if draw(st.booleans()):
            section[path[-1]] = draw(_JSON)
        else:
            del section[path[-1]]
        if not config:
            break
    return config


@settings(deadline=None)
@given(broken_configs(PUBLISHED))
def test_any_config_is_read_or_refused(config: dict[str, Any]) -> None:
    try:
        geometry = read_geometry(config)
    except BadCheckpoint:
        return
    assert isinstance(geometry, ModelGeometry)
    for layer in geometry.layers:
        assert not layer.has_kv or min(layer.num_q_heads, layer.num_kv_heads, layer.head_dim_k) > 0
    weights = estimate_weight_bytes(config, geometry)
    assert isinstance(weights, WeightBytes)
    assert (weights.bytes is None) == (weights.source is None)


_TARGETS = tuple(read_geometry(published(name)) for name in ("qwen3-8b", "llama-3.1-8b"))


@settings(deadline=None)
@given(broken_configs(DRAFTERS), st.sampled_from(_TARGETS))
def test_any_drafters_config_is_read_or_refused(
    config: dict[str, Any], target: ModelGeometry
) -> None:
    try:
        geometry, facts = read_draft_geometry(config, target)
    except BadCheckpoint:
        return
    assert all(0 <= index < len(target.layers) for index in facts.target_layer_ids)
    assert geometry.hidden_size == target.hidden_size
    assert isinstance(estimate_weight_bytes(config, geometry), WeightBytes)


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling", "layer_types"])
def test_a_decoders_field_beside_its_section_is_refused(field: str) -> None:
    config = {**tiny("gemma3"), field: {"rope_type": "yarn", "factor": 2.0}}
    assert f"{field} is" in refused(config)
    assert "text_config" in refused(config)


@pytest.mark.parametrize("pattern", [0.5, [0.5], [], [1.5] * 4, [-1.0] * 4])
def test_sparsity_is_a_share_for_each_layer(pattern: Any) -> None:
    config = tiny("gemma3n_text")
    count = config["num_hidden_layers"]
    share = [0.5] * count
    assert read_geometry({**config, "activation_sparsity_pattern": share})
    assert "activation_sparsity_pattern is" in refused(
        {**config, "activation_sparsity_pattern": pattern}
    )
