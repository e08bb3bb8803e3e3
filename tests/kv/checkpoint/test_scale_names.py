"""Every spelling of a scale's name, and the layer that it belongs to under any prefix."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvant.kv.checkpoint.facts import CheckpointKV, KVWish, ScalePromise, UnreadableWish
from kvant.kv.checkpoint.lookup import read_place, same_layer, scale_for, unclaimed, wish_for
from kvant.kv.checkpoint.scales import ScaleName, ScaleRole, read_scale_name
from kvant.kv.dtype import KVDtype
from kvant.kv.format import Side
from kvant.kv.geometry import Attention
from tests.kv.checkpoint.build import Raw, f32, layer, modelopt_file, scales, weight, write
from tests.kv.checkpoint.stored import read_checkpoint

K, V, BOTH = (Side.K,), (Side.V,), (Side.K, Side.V)

PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")

SPELLINGS = {
    "self_attn.k_scale": K,
    "self_attn.v_scale": V,
    "self_attn.kv_scale": BOTH,
    "self_attn.attn.k_scale": K,
    "self_attn.attn.v_scale": V,
    "self_attn.attn.kv_scale": BOTH,
    "self_attn.k_proj.k_scale": K,
    "self_attn.v_proj.v_scale": V,
    "self_attn.qkv_proj.k_scale": K,
    "self_attn.qkv_proj.v_scale": V,
    "self_attn.k_proj.output_scale": K,
    "self_attn.v_proj.output_scale": V,
    "self_attn.attn.k_proj.k_scale": K,
    "self_attn.attn.v_proj.output_scale": V,
    "self_attn.mla_attn.attn.k_scale": K,
    "self_attn.kv_b_proj.k_scale": K,
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_means_a_scale_of_the_attention_module(prefix: str, spelling: str) -> None:
    module = f"{prefix}layers.7.self_attn"
    found = read_scale_name(f"{prefix}layers.7.{spelling}")
    assert found == ScaleName(module, ScaleRole.SCALE, SPELLINGS[spelling])


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("transformer.h.3.attn.k_scale", "transformer.h.3.attn"),
        ("transformer.h.3.attn.attn.k_scale", "transformer.h.3.attn"),
        ("gpt_neox.layers.3.attention.query_key_value.k_scale", "gpt_neox.layers.3.attention"),
        ("backbone.layers.3.mixer.k_proj.k_scale", "backbone.layers.3.mixer"),
    ],
)
def test_an_attention_module_that_is_itself_called_attn_keeps_its_name(
    name: str, module: str
) -> None:
    found = read_scale_name(name)
    assert found is not None
    assert found.module == module


@pytest.mark.parametrize(
    ("leaf", "role"),
    [
        ("k_global_scale", ScaleRole.GLOBAL_SCALE),
        ("v_global_scale", ScaleRole.GLOBAL_SCALE),
        ("q_scale", ScaleRole.QUERY),
        ("attn.q_scale", ScaleRole.QUERY),
        ("q_proj.q_scale", ScaleRole.QUERY),
        ("q_proj.output_scale", ScaleRole.QUERY),
        ("prob_output_scale", ScaleRole.PROBABILITY),
        ("attn.prob_scale", ScaleRole.PROBABILITY),
        ("k_proj.k_bias", ScaleRole.OFFSET),
        ("v_proj.v_bias", ScaleRole.OFFSET),
        ("k_zero_point", ScaleRole.OFFSET),
        ("k_cache_scale", ScaleRole.CHANNEL),
        ("v_cache_offset", ScaleRole.CHANNEL),
    ],
)
def test_relatives_of_scales_are_recognised_for_what_they_are(leaf: str, role: ScaleRole) -> None:
    found = read_scale_name(f"model.layers.0.self_attn.{leaf}")
    assert found is not None
    assert found.role is role
    assert found.module == "model.layers.0.self_attn"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.o_proj.output_scale",
        "model.layers.0.mlp.gate_proj.output_scale",
        "model.layers.0.self_attn.k_norm.weight",
        "k_scale",
        "k_proj",
        "output_scale",
        "",
        ".",
    ],
)
def test_other_tensors_are_not_taken_for_scales(name: str) -> None:
    assert read_scale_name(name) is None


@given(st.lists(st.sampled_from(["", "attn", "k_proj", "self_attn", "k_scale", "layers", "3"])))
def test_any_name_is_read_without_a_fault(parts: list[str]) -> None:
    name = ".".join(parts)
    found = read_scale_name(name)
    read_place(name)
    if found is not None:
        assert name.startswith(found.module)


# -- from layers to names ------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", PREFIXES)
@pytest.mark.parametrize("ours", PREFIXES)
def test_text_prefixes_are_interchangeable(ours: str, theirs: str) -> None:
    assert same_layer(f"{ours}layers.3.self_attn", f"{theirs}layers.3.self_attn")
    assert not same_layer(f"{ours}layers.3.self_attn", f"{theirs}layers.13.self_attn")


@pytest.mark.parametrize(
    "other",
    [
        "vision_tower.encoder.layers.3.self_attn",
        "vision_model.encoder.layers.3.self_attn",
        "visual.blocks.3.attn",
        "model.visual.blocks.3.attn",
        "audio_tower.layers.3.self_attn",
        "mtp.layers.3.self_attn",
        "draft_model.layers.3.self_attn",
        "drafter.model.layers.3.self_attn",
        "talker.model.layers.3.self_attn",
        "model.layers.3.cross_attn",
        "model.layers.3.linear_attn",
        "model.layers.3.self_attn.indexer",
        "model.layers.4.self_attn",
        "self_attn",
        "layers.three.self_attn",
        "layers.³.self_attn",
    ],
)
def test_other_towers_drafters_and_modules_are_not_the_text_layer(other: str) -> None:
    assert not same_layer("model.layers.3.self_attn", other)
    assert not same_layer("language_model.model.layers.3.self_attn", other)


@pytest.mark.parametrize("module", ["attn", "attention", "self_attention", "mixer"])
def test_attention_modules_by_other_names_are_the_same_module(module: str) -> None:
    assert same_layer("model.layers.3.self_attn", f"transformer.h.3.{module}")
    assert not same_layer("model.layers.3.mlp", f"transformer.h.3.{module}")


def test_a_drafters_own_layers_are_found_under_its_own_prefix() -> None:
    assert same_layer("draft.layers.0.self_attn", "draft.model.layers.0.self_attn")
    assert not same_layer("draft.layers.0.self_attn", "mtp.layers.0.self_attn")


def read(tmp_path: Path, tensors: dict[str, Raw]) -> CheckpointKV:
    return read_checkpoint(write(tmp_path, tensors=tensors))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_scale_is_found_for_the_plans_layer_under_any_prefix(tmp_path: Path, prefix: str) -> None:
    tensors = scales(("k_proj.k_scale", "v_proj.v_scale"), prefix=prefix + "layers.{}.self_attn.")
    tensors |= scales(prefix="vision_tower.encoder.layers.{}.self_attn.")
    checkpoint = read(tmp_path, tensors)
    for at in (layer(1), layer(1, "model.language_model.layers.{}.self_attn")):
        for side, projection in ((Side.K, "k_proj.k_scale"), (Side.V, "v_proj.v_scale")):
            found = scale_for(checkpoint, at, side)
            assert found is not None
            assert found.name == f"{prefix}layers.1.self_attn.{projection}"
            assert not found.rivals
    assert scale_for(checkpoint, layer(2), Side.K) is None


def test_a_vision_towers_scale_alone_is_not_the_text_layers(tmp_path: Path) -> None:
    checkpoint = read(tmp_path, scales(prefix="vision_tower.encoder.layers.{}.self_attn."))
    assert scale_for(checkpoint, layer(0), Side.K) is None


def test_kv_scale_serves_both_sides(tmp_path: Path) -> None:
    checkpoint = read(tmp_path, scales(("kv_scale",)))
    for side in Side:
        found = scale_for(checkpoint, layer(0), side)
        assert found is not None
        assert found.side is side
        assert found.name == "model.layers.0.self_attn.kv_scale"


@pytest.mark.parametrize("second", ["k_proj.output_scale", "attn.k_scale", "kv_scale"])
def test_two_tensors_for_one_scale_are_rivals(tmp_path: Path, second: str) -> None:
    checkpoint = read(tmp_path, scales(("k_scale", second)))
    found = scale_for(checkpoint, layer(0), Side.K)
    assert found is not None
    assert {found.name, *found.rivals} == {
        "model.layers.0.self_attn.k_scale",
        f"model.layers.0.self_attn.{second}",
    }


def test_two_prefixes_for_one_layer_are_rivals_unless_one_is_the_layers_own(tmp_path: Path) -> None:
    tensors = scales(prefix="language_model.model.layers.{}.self_attn.")
    tensors |= scales(prefix="model.language_model.layers.{}.self_attn.")
    checkpoint = read(tmp_path, tensors)
    found = scale_for(checkpoint, layer(0), Side.K)
    assert found is not None
    assert len(found.rivals) == 1
    own = scale_for(checkpoint, layer(0, "model.language_model.layers.{}.self_attn"), Side.K)
    assert own is not None
    assert own.rivals == ()


def test_a_global_scale_counts_and_block_scales_beside_it_do_not(tmp_path: Path) -> None:
    tensors = scales(("k_global_scale",), num_layers=1)
    tensors["model.layers.0.self_attn.k_scale"] = f32(*[1.0] * 16, shape=(4, 1, 4))
    checkpoint = read(tmp_path, tensors)
    found = scale_for(checkpoint, layer(0), Side.K)
    assert found is not None
    assert found.name.endswith("k_global_scale")
    assert found.inverse
    assert found.rivals == ()
    (ignored,) = checkpoint.ignored
    assert "row by row" in ignored


@pytest.mark.case("A14")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_maps_entry_is_found_under_any_prefix(tmp_path: Path, prefix: str) -> None:
    body = modelopt_file(
        "MIXED_PRECISION",
        kv_cache_quantized_layers={f"{prefix}layers.1.self_attn": {"quant_algo": "FP8"}},
        kv_cache_schema_version=1,
    )
    checkpoint = read_checkpoint(write(tmp_path, hf_quant=body))
    wish = wish_for(checkpoint, layer(1))
    assert isinstance(wish, KVWish)
    assert wish.k is KVDtype.FP8_E4M3
    assert wish_for(checkpoint, layer(0)) is None
    assert unclaimed(checkpoint, [layer(0), layer(1)]) == ()


def test_two_entries_that_mean_one_layer_must_agree() -> None:
    fp8 = KVWish(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3, "map", ScalePromise.CAST)
    nvfp4 = KVWish(KVDtype.NVFP4, KVDtype.NVFP4, "map", ScalePromise.CAST)
    names = ("language_model.model.layers.0.self_attn", "model.language_model.layers.0.self_attn")
    agreeing = CheckpointKV(per_layer=dict.fromkeys(names, fp8))
    assert wish_for(agreeing, layer(0)) == fp8
    differing = CheckpointKV(per_layer={names[0]: fp8, names[1]: nvfp4})
    wish = wish_for(differing, layer(0))
    assert isinstance(wish, UnreadableWish)
    for name in names:
        assert name in wish.why
    assert wish_for(differing, layer(0, "model.language_model.layers.{}.self_attn")) == nvfp4


def test_without_a_map_every_layer_has_the_global_wish() -> None:
    fp8 = KVWish(KVDtype.FP8_E4M3, KVDtype.FP8_E4M3, "scheme", ScalePromise.CAST)
    assert wish_for(CheckpointKV(scheme=fp8), layer(7)) is fp8
    assert wish_for(CheckpointKV(), layer(7)) is None


# -- names without a layer -------------------------------------------------------------------------


def test_scales_and_entries_of_no_layer_with_kv_are_listed_once_per_owner(tmp_path: Path) -> None:
    tensors = (
        scales()
        | scales(prefix="visual.blocks.{}.attn.")
        | scales(prefix="mtp.layers.{}.self_attn.")
    )
    tensors["midlayer.self_attn.k_scale"] = f32(1.0)
    checkpoint = read(tmp_path, tensors)
    lines = unclaimed(checkpoint, [layer(0), layer(1)])
    assert len(lines) == 3
    assert "visual.blocks.0.attn.k_scale and 3 more (visual)" in lines[0]
    assert "mtp.layers.0.self_attn.k_scale and 3 more (mtp)" in lines[1]
    assert "midlayer.self_attn.k_scale (midlayer.self_attn)" in lines[2]


def test_a_stray_kv_scale_is_one_tensor(tmp_path: Path) -> None:
    checkpoint = read(
        tmp_path, scales(("kv_scale",), prefix="mtp.layers.{}.self_attn.", num_layers=1)
    )
    (line,) = unclaimed(checkpoint, [layer(0)])
    assert "kv_scale (mtp)" in line


def test_layers_that_share_kv_own_no_scale(tmp_path: Path) -> None:
    checkpoint = read(tmp_path, scales())
    (line,) = unclaimed(checkpoint, [layer(0), layer(1, attention=Attention.SHARED)])
    assert "model.layers.1.self_attn.k_scale and 1 more" in line


def test_a_map_that_matches_nothing_is_noticed(tmp_path: Path) -> None:
    body = modelopt_file(
        "FP8",
        kv_cache_quantized_layers={"model.layers.9.self_attn": {"quant_algo": "FP8"}},
        kv_cache_schema_version=1,
    )
    checkpoint = read_checkpoint(write(tmp_path, hf_quant=body, tensors={"w": weight()}))
    (line,) = unclaimed(checkpoint, [layer(0)])
    assert "model.layers.9.self_attn" in line
