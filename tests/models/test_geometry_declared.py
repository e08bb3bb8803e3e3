"""Plans refuse values in config.json of exactly the kinds that transformers' config classes refuse."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from kvant.errors import BadCheckpoint
from kvant.models.geometry import read_geometry
from kvant.models.geometry.declared import (
    activations,
    declared_kinds,
    left_out,
    refuse_undeclared,
)
from kvant.models.geometry.families import FAMILIES
from kvant.models.geometry.fields import Fields
from kvant.models.quiet import quiet_transformers
from kvant.models.read_shape import read_shape
from tests.models import configs, meta

VALUES: tuple[Any, ...] = (None, "x", [1], ["a"], {"a": 1}, 1.5, True, 1)

BY_TYPE = {configs.tiny(name)["model_type"]: name for name in reversed(configs.TINY_NAMES)}


def _starts(config: dict[str, Any]) -> str:
    """Transformers' words about the kind of a value, "" if it takes all of them."""
    with quiet_transformers():
        try:
            CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
        except Exception as fault:  # classes compute with what they have not checked yet
            return str(fault)
    return ""


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_a_value_is_refused_exactly_if_transformers_does_not_take_its_kind(model_type: str) -> None:
    config = configs.tiny(BY_TYPE[model_type])
    kinds = declared_kinds(model_type)
    assert "tie_word_embeddings" in kinds
    wrong = []
    for field in kinds:
        for value in VALUES:
            if value == "x" and field in ("hidden_act", "hidden_activation"):
                continue  # of the right kind, but none of the activations
            given = {**config, field: value}
            says = _starts(given)
            try:
                refuse_undeclared(Fields(given), model_type)
            except BadCheckpoint:
                if not says:
                    wrong.append((field, value, "transformers takes it"))
            else:
                if f"TypeError: Field '{field}'" in says:
                    wrong.append((field, value, says))
    assert not wrong


def test_an_activation_that_transformers_lacks_is_refused_by_name() -> None:
    assert set(activations()) == set(ACT2FN)
    for name in ("silu", "gelu_pytorch_tanh"):
        read_geometry({**configs.tiny("llama"), "hidden_act": name})
    with pytest.raises(BadCheckpoint, match=r"hidden_act is 'silly'(.|\n)*silu"):
        read_geometry({**configs.tiny("llama"), "hidden_act": "silly"})


def test_nothing_is_refused_for_a_class_that_transformers_lacks() -> None:
    given = Fields({"head_dim": None, "hidden_act": "its_own"})
    refuse_undeclared(given, "a_type_of_its_own")
    with pytest.raises(BadCheckpoint, match="head_dim"):
        refuse_undeclared(given, "phi3")


def test_what_a_config_leaves_out_is_as_the_class_has_it() -> None:
    for name in ("llama", "qwen3_moe", "gemma3_text", "gpt_oss", "siglip_vision_model"):
        made = CONFIG_MAPPING[name]()
        assert left_out((), name)
        for field, value in left_out((), name).items():
            if field != "sliding_window":  # which a second field switches off
                assert getattr(made, field) == value, (name, field)
    assert "num_experts" not in left_out(["num_local_experts"], "qwen3_moe")
    assert "num_local_experts" not in left_out(["num_experts"], "qwen3_moe")


_LAYERS = ["full_attention"] * 4


def _refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=re.escape(f"config.json: {named}")) as refused:
        read_geometry(config)
    assert refused.value.ways_out


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"initializer_range": 1.5}, "initializer_range is 1.5"),
        ("llama", {"layer_types": _LAYERS[1:]}, "layer_types is "),
        ("llama", {"rope_scaling": "x"}, "rope_scaling is 'x'"),
        ("llama", {"rope_parameters": {"rope_type": None}}, "rope_parameters.rope_type is null"),
        ("llama", {"rope_parameters": {"rope_type": {}}}, "rope_parameters.rope_type is {}"),
        ("qwen2", {"head_dim": None}, "head_dim is null"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("gemma3", {"vision_config": {"hidden_size": "x"}}, "vision_config.hidden_size is 'x'"),
        ("gemma3", {"vision_config": {"dtype": "x"}}, "vision_config.dtype is 'x'"),
        ("gemma3", {"vision_config": 3}, "vision_config is 3"),
        ("gemma4_text", {"use_bidirectional_attention": 3}, "use_bidirectional_attention is 3"),
        ("gemma4_text", {"rope_parameters": {}}, "rope_parameters.sliding_attention is missing"),
    ],
)
def test_what_transformers_cannot_make_is_named(
    name: str, changes: dict[str, Any], named: str
) -> None:
    config = {**configs.tiny(name), **changes}
    with pytest.raises(Exception, match=r"."):  # each class has errors of its own
        meta.build(config)
    _refused(config, named)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"rope_theta": 0}, "rope_theta is 0"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("qwen3_moe", {"num_experts_per_tok": ..., "num_experts": 4}, "num_experts_per_tok"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok is null"),
        ("deepseek_v2", {"num_experts_per_tok": ...}, "num_experts_per_tok is missing"),
        ("deepseek_v2", {"topk_method": "x"}, "topk_method is 'x'"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts is -1"),
        ("deepseek_v3", {"n_group": None}, "n_group is null"),
        ("deepseek_v3", {"head_dim": 6}, "head_dim is 6"),
        ("phi3", {"pad_token_id": ...}, "pad_token_id is missing"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window is null"),
        ("gemma3", {"vision_config": {"hidden_size": 0}}, "vision_config.hidden_size is 0"),
    ],
)
def test_what_no_start_runs_is_named(name: str, changes: dict[str, Any], named: str) -> None:
    config = configs.changed(configs.tiny(name), **changes)
    with pytest.raises(BadCheckpoint, match=re.escape(f"config.json: {named}")) as refused:
        read_shape(config)
    assert refused.value.ways_out


def test_every_listed_type_that_transformers_has_is_found() -> None:
    types = {name for family in FAMILIES for name in family.model_types}
    assert [name for name in sorted(types & set(CONFIG_MAPPING)) if not declared_kinds(name)] == []


def test_null_in_a_field_that_a_start_needs_is_refused_with_its_section() -> None:
    config = configs.published("gemma-3-4b")
    config["text_config"]["num_attention_heads"] = None
    with pytest.raises(BadCheckpoint, match=r"text_config.num_attention_heads is null") as refused:
        read_geometry(config)
    assert refused.value.why == "transformers takes a whole number"
    assert refused.value.ways_out


_ROTARY: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    "llama3": {
        "factor": 2.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("rope_type", _ROTARY)
def test_rotary_numbers_are_refused_exactly_if_transformers_cannot_compute_with_them(
    rope_type: str,
) -> None:
    whole = {"rope_type": rope_type, "rope_theta": 1e4, **_ROTARY[rope_type]}
    for field in whole.keys() - {"rope_type"}:
        for value in (..., None, "x", [1], {"a": 1}, 3):
            given = configs.changed(whole, **{field: value})
            config = {**configs.tiny("llama"), "rope_parameters": given}
            try:
                meta.build(config)
            except Exception:  # from a check of the config, or from the arithmetic
                with pytest.raises(BadCheckpoint, match=field) as refused:
                    read_geometry(config)
                assert refused.value.ways_out
            else:
                read_geometry(config)


@pytest.mark.parametrize("value", [None, "x", [1]])
def test_a_rope_theta_that_is_no_number_is_refused(value: Any) -> None:
    config = {**configs.tiny("qwen3"), "rope_theta": value}
    with pytest.raises(Exception, match="unsupported operand"):
        meta.build(config)
    with pytest.raises(BadCheckpoint, match="rope_theta is"):
        read_geometry(config)


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "gemma3n_text", "mimo_v2_flash"])
def test_a_padding_token_beyond_the_vocabulary_is_refused_as_by_transformers(
    model_type: str,
) -> None:
    config = configs.tiny(BY_TYPE[model_type])
    size = config["vocab_size"]
    for inside in (None, 0, size - 1, -size):
        given = {**config, "pad_token_id": inside}
        read_geometry(given)
        meta.build(given)
    for beyond in (size, -size - 1):
        given = {**config, "pad_token_id": beyond}
        with pytest.raises(AssertionError, match="Padding_idx"):
            meta.build(given)
        with pytest.raises(BadCheckpoint, match=f"pad_token_id is {beyond}(.|\n)*{size} tokens"):
            read_geometry(given)
