"""DFlash drafters: both styles of config, and what does not fit the target."""

from __future__ import annotations

from typing import Any

import pytest

from kvant.errors import BadCheckpoint
from kvant.kv.geometry import Attention, ModelGeometry
from kvant.models.geometry import (
    DraftFacts,
    read_draft_geometry,
    read_geometry,
)
from tests.models.configs import published

TARGET = read_geometry(published("qwen3-8b"))
SLIDING, FULL = "sliding_attention", "full_attention"


def z_lab(
    *, dflash: dict[str, Any] | None = None, **changes: Any
) -> tuple[ModelGeometry, DraftFacts]:
    """z-lab's drafter for Qwen3-8B with changed fields; `...` removes one."""
    return read_draft_geometry(z_lab_config(dflash=dflash, **changes), TARGET)


def z_lab_config(*, dflash: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    config = published("dflash-qwen3-8b", **changes)
    merged = {**config["dflash_config"], **(dflash or {})}
    config["dflash_config"] = {k: v for k, v in merged.items() if v is not ...}
    return config


def speculators(
    *, inner: dict[str, Any] | None = None, **changes: Any
) -> tuple[ModelGeometry, DraftFacts]:
    return read_draft_geometry(speculators_config(inner=inner, **changes), TARGET)


def speculators_config(*, inner: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    config = published("speculator-dflash-qwen3-8b", **changes)
    merged = {**config["transformer_layer_config"], **(inner or {})}
    config["transformer_layer_config"] = {k: v for k, v in merged.items() if v is not ...}
    return config


def windows(geometry: ModelGeometry) -> list[int | None]:
    return [layer.window for layer in geometry.layers]


def causal(geometry: ModelGeometry) -> list[bool]:
    return [layer.causal for layer in geometry.layers]


def refused(config: dict[str, Any], target: ModelGeometry = TARGET) -> BadCheckpoint:
    with pytest.raises(BadCheckpoint) as caught:
        read_draft_geometry(config, target)
    return caught.value


def test_the_standard_drafter_looks_both_ways_without_a_window() -> None:
    geometry, facts = z_lab()
    assert [layer.name for layer in geometry.layers] == [f"layers.{i}.self_attn" for i in range(5)]
    assert {layer.attention for layer in geometry.layers} == {Attention.FULL}
    assert causal(geometry) == [False] * 5
    first = geometry.layers[0]
    assert (first.num_q_heads, first.num_kv_heads, first.head_dim_k) == (32, 8, 128)
    assert facts == DraftFacts(
        block_size=16,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        draft_vocab_size=151936,
        target_vocab_size=151936,
    )


def test_without_layer_types_all_layers_are_full_and_look_both_ways() -> None:
    geometry, _ = z_lab(layer_types=...)
    assert windows(geometry) == [None] * 5
    assert causal(geometry) == [False] * 5


def test_a_hybrid_drafter_is_causal_where_it_has_a_window() -> None:
    geometry, _ = z_lab(layer_types=[SLIDING] * 4 + [FULL], sliding_window=2048)
    assert windows(geometry) == [2048] * 4 + [None]
    assert causal(geometry) == [True] * 4 + [False]


@pytest.mark.parametrize("layer_types", [..., [FULL] * 5])
def test_use_swa_puts_a_window_on_every_layer_that_still_looks_both_ways(layer_types: Any) -> None:
    geometry, _ = z_lab(
        dflash={"use_swa": True, "swa_window_size": 1024, "attention_sink_bias": True},
        layer_types=layer_types,
    )
    assert windows(geometry) == [1024] * 5
    assert causal(geometry) == [False] * 5
    assert all(layer.sinks for layer in geometry.layers)


def test_use_swa_leaves_layer_types_that_name_sliding_layers() -> None:
    geometry, _ = z_lab(
        dflash={"use_swa": True, "swa_window_size": 64}, layer_types=[SLIDING] + [FULL] * 4
    )
    assert windows(geometry) == [64, None, None, None, None]


def test_swa_window_size_goes_before_sliding_window() -> None:
    hybrid: dict[str, Any] = {"layer_types": [SLIDING] * 5, "sliding_window": 2048}
    assert windows(z_lab(**hybrid)[0]) == [2048] * 5
    assert windows(z_lab(dflash={"swa_window_size": 64}, **hybrid)[0]) == [64] * 5


@pytest.mark.parametrize(
    ("top", "inside", "expected"),
    [
        (..., ..., [True, False]),
        (..., False, [False, False]),
        (..., True, [True, True]),
        (False, True, [False, False]),
        (True, False, [True, True]),
    ],
)
def test_is_causal_goes_before_dflash_causal_before_layer_types(
    top: Any, inside: Any, expected: list[bool]
) -> None:
    geometry, _ = z_lab(
        dflash={"causal": inside}, is_causal=top, layer_types=[SLIDING] + [FULL] * 4,
        sliding_window=64,
    )  # fmt: skip
    assert causal(geometry)[:2] == expected


def test_a_window_without_a_size_is_refused() -> None:
    assert "sliding_window is null" in str(refused(z_lab_config(layer_types=[SLIDING] * 5)))
    assert "sliding_window is null" in str(refused(z_lab_config(dflash={"use_swa": True})))


def test_block_size_stands_at_the_top_or_inside() -> None:
    assert z_lab(dflash={"block_size": 8}, block_size=...)[1].block_size == 8
    assert z_lab(dflash={"block_size": 16})[1].block_size == 16
    assert "dflash_config says 8" in str(refused(z_lab_config(dflash={"block_size": 8})))
    assert "block_size is missing" in str(refused(z_lab_config(block_size=...)))
    assert "block_size is 1" in str(refused(z_lab_config(block_size=1)))


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, (18,)), (2, (1, 33)), (3, (1, 17, 33)), (5, (1, 9, 17, 25, 33))],
)
def test_layers_to_tap_have_z_labs_default(count: int, expected: tuple[int, ...]) -> None:
    _, facts = z_lab(
        dflash={"target_layer_ids": ...}, num_hidden_layers=count, layer_types=[FULL] * count
    )
    assert facts.target_layer_ids == expected


def test_the_speculators_drafter_is_causal_where_it_has_a_window() -> None:
    geometry, facts = speculators()
    assert windows(geometry) == [2048] * 4 + [None]
    assert causal(geometry) == [True] * 4 + [False]
    assert geometry.layers[0].name == "layers.0.self_attn"
    assert facts.draft_vocab_size == geometry.vocab_size == 32000
    assert geometry.hidden_size == 4096


def test_sliding_window_non_causal_lets_every_layer_look_both_ways() -> None:
    geometry, _ = speculators(sliding_window_non_causal=True)
    assert windows(geometry) == [2048] * 4 + [None]
    assert causal(geometry) == [False] * 5


def test_speculators_block_size_is_8_where_none_is_given() -> None:
    assert speculators(block_size=...)[1].block_size == 8
    assert speculators(block_size=12)[1].block_size == 12


def test_both_styles_name_the_same_tapped_layers_by_different_numbers() -> None:
    # z-lab counts decoder layers; speculators counts hidden states, of which the first is the
    # embedding's.
    assert published("dflash-qwen3-8b")["dflash_config"]["target_layer_ids"][0] == 1
    assert published("speculator-dflash-qwen3-8b")["aux_hidden_state_layer_ids"][0] == 2
    assert z_lab()[1].target_layer_ids == speculators()[1].target_layer_ids


def test_the_last_layer_can_be_tapped_in_both_styles_and_none_beyond() -> None:
    assert z_lab(dflash={"target_layer_ids": [35]})[1].target_layer_ids == (35,)
    assert speculators(aux_hidden_state_layer_ids=[36])[1].target_layer_ids == (35,)
    for config in (
        z_lab_config(dflash={"target_layer_ids": [36]}),
        speculators_config(aux_hidden_state_layer_ids=[37]),
    ):
        assert "36 layers" in str(refused(config))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (z_lab_config(hidden_size=2048), "hidden_size is 2048"),
        (z_lab_config(vocab_size=128256), "vocab_size is 128256"),
        (z_lab_config(num_target_layers=40), "num_target_layers is 40"),
        (z_lab_config(dflash={"mask_token_id": 151936}), "dflash_config.mask_token_id is 151936"),
        (speculators_config(target_hidden_size=5120), "target_hidden_size is 5120"),
        (speculators_config(inner={"hidden_size": 2048}),
         "transformer_layer_config.hidden_size is 2048"),
        (speculators_config(draft_vocab_size=200000), "draft_vocab_size is 200000"),
    ],
)  # fmt: skip
def test_a_drafter_of_another_target_is_refused(config: dict[str, Any], named: str) -> None:
    fault = refused(config)
    assert named in fault.what
    assert "trained for another model" in fault.why
    assert fault.ways_out


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (z_lab_config(dflash={"mask_token_id": ...}), "mask_token_id is missing"),
        (z_lab_config(dflash={"target_layer_ids": [1, 1]}), "none twice"),
        (z_lab_config(dflash={"target_layer_ids": [-1]}), "target_layer_ids is [-1]"),
        (z_lab_config(layer_types=[FULL]), "it has 1 entries for 5 layers"),
        (z_lab_config(num_key_value_heads=5), "num_key_value_heads is 5"),
        (z_lab_config(markov_rank=64), "DSpark"),
        (speculators_config(aux_hidden_state_layer_ids=...), "state_layer_ids is missing"),
        (speculators_config(aux_hidden_state_layer_ids=[0]), "aux_hidden_state_layer_ids is [0]"),
        (speculators_config(aux_hidden_state_layer_ids=[]), "at least one layer"),
        (speculators_config(inner={"sliding_window": ...}), "sliding_window is missing"),
        ({"speculators_model_type": "dflash"}, "transformer_layer_config is missing"),
        (speculators_config(mask_token_id=...), "mask_token_id is missing"),
        (speculators_config(sample_from_anchor=True), "sample_from_anchor is True"),
        (speculators_config(speculators_model_type="eagle3"), "speculators_model_type is 'eagle3'"),
        (published("qwen3-8b"), "is no DFlash drafter"),
        ({}, "is no DFlash drafter"),
    ],
)  # fmt: skip
def test_fields_that_are_missing_or_make_no_sense_are_named(
    config: dict[str, Any], named: str
) -> None:
    assert named in str(refused(config))


def test_a_target_too_short_for_the_default_must_be_named() -> None:
    short = published("qwen3-8b", num_hidden_layers=3)
    config = z_lab_config(dflash={"target_layer_ids": ...}, num_target_layers=3)
    assert "target_layer_ids is missing" in str(refused(config, read_geometry(short)))
