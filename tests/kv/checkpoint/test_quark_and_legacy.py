"""Quark's groups, plain fp8 with bare scales, and unknown quantisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvant.kv.checkpoint.facts import KVWish, ScalePromise, UnreadableWish
from kvant.kv.checkpoint.lookup import wish_for
from kvant.kv.dtype import KVDtype
from tests.kv.checkpoint.build import followed, layer, scales, write
from tests.kv.checkpoint.stored import read_checkpoint

FP8 = KVDtype.FP8_E4M3
SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": None}


def quark(
    group: Any = ("*k_proj", "*v_proj"), *, key: str = "layer_quant_config", **specs: Any
) -> dict[str, Any]:
    """A Quark config whose group's members all have SPEC, some of its fields changed."""
    members = group if isinstance(group, tuple) else ()
    return {
        "quant_method": "quark",
        "export": {"kv_cache_group": list(group) if isinstance(group, tuple) else group},
        key: {name: {"weight": None, "output_tensors": {**SPEC, **specs}} for name in members},
    }


def scheme_of(tmp_path: Path, config: Any) -> Any:
    return read_checkpoint(write(tmp_path, config)).scheme


@pytest.mark.parametrize(
    ("group", "k", "v"),
    [
        (("*k_proj", "*v_proj"), FP8, FP8),
        (("*.k_proj", "*.v_proj"), FP8, FP8),
        (("*self_attn.k_proj", "*self_attn.v_proj"), FP8, FP8),
        (("*language_model*k_proj", "*language_model*v_proj"), FP8, FP8),
        (("*qkv_proj",), FP8, FP8),
        (("*k_proj",), FP8, None),
        (("*v_proj",), None, FP8),
    ],
)
def test_a_group_of_patterns_speaks_for_every_layer(
    tmp_path: Path, group: tuple[str, ...], k: KVDtype | None, v: KVDtype | None
) -> None:
    wish = scheme_of(tmp_path, quark(group))
    where = "config.json: quantization_config.export.kv_cache_group"
    assert wish == KVWish(k, v, where, ScalePromise.STATIC)


def test_full_paths_speak_for_single_layers(tmp_path: Path) -> None:
    group = ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.v_proj")
    read = read_checkpoint(write(tmp_path, quark(group)))
    assert wish_for(read, layer(0)) is None
    assert (followed(read, layer(1)).k, followed(read, layer(1)).v) == (FP8, FP8)


def test_specs_may_stand_in_the_newer_section(tmp_path: Path) -> None:
    assert isinstance(scheme_of(tmp_path, quark(key="kv_cache_quant_config")), KVWish)


@pytest.mark.parametrize("group", [(), None])
def test_an_empty_group_is_no_wish(tmp_path: Path, group: Any) -> None:
    read = read_checkpoint(write(tmp_path, quark(group), tensors={}))
    assert read.scheme is None
    assert read.notes == ()


@pytest.mark.parametrize(
    ("specs", "nearest"),
    [
        ({"dtype": "int8"}, KVDtype.INT8_PER_TOKEN_HEAD),
        ({"dtype": "fp8_e5m2"}, KVDtype.FP8_E5M2),
        ({"dtype": "fp4"}, KVDtype.NVFP4),
        ({"is_dynamic": True}, KVDtype.FP8_PER_TOKEN_HEAD),
        ({"qscheme": "per_channel"}, KVDtype.FP8_PER_TOKEN_HEAD),
        ({"dtype": ["fp8_e4m3"]}, None),
        ({"dtype": "mystery"}, None),
    ],
)
def test_other_specs_are_unreadable_with_the_nearest_format(
    tmp_path: Path, specs: Any, nearest: KVDtype | None
) -> None:
    wish = scheme_of(tmp_path, quark(**specs))
    assert isinstance(wish, UnreadableWish)
    assert wish.nearest is nearest
    assert "fp8_e4m3 per_tensor" in wish.why
    assert ("nearest" in wish.why) is (nearest is not None)
    assert ("dynamic" in wish.asked) is ("is_dynamic" in specs)


def differing() -> dict[str, Any]:
    config = quark()
    config["layer_quant_config"]["*v_proj"]["output_tensors"]["dtype"] = "int8"
    return config


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "quark"}, "export"),
        ({"quant_method": "quark", "export": None}, "export"),
        (quark("*k_proj"), "list of names"),
        (quark([1, 2]), "list of names"),
        ({**quark(), "layer_quant_config": {}}, "has no output_tensors"),
        ({**quark(), "layer_quant_config": {"*k_proj": None}}, "has no output_tensors"),
        (differing(), "differ"),
        (quark(("*gate_proj",)), "known endings"),
        (quark(("*",)), "known endings"),
        (quark(("*experts*k_proj",)), "full path"),
        (quark(("k_proj",)), "full path"),
        (quark(("*layers.3.*k_proj",)), "full path"),
        (quark(("*k_proj", "model.layers.1.self_attn.v_proj")), "all layers and single ones"),
    ],
)
def test_a_config_that_does_not_add_up_is_unreadable(
    tmp_path: Path, config: Any, says: str
) -> None:
    wish = scheme_of(tmp_path, config)
    assert isinstance(wish, UnreadableWish)
    assert says in wish.why


# -- plain fp8 -----------------------------------------------------------------------------------


def test_bare_scales_are_no_wish_but_a_note_tells_how_to_use_them(tmp_path: Path) -> None:
    write(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, tensors=scales())
    read = read_checkpoint(tmp_path)
    assert read.scheme is None
    assert len(read.scales) == 4
    (note,) = read.notes
    assert "4 KV scales" in note
    assert "--kv-cache-dtype fp8_e4m3" in note


def test_scales_beside_an_explicit_none_get_the_same_note(tmp_path: Path) -> None:
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": None}
    read = read_checkpoint(
        write(tmp_path, quantization, tensors=scales(("kv_scale",), num_layers=1))
    )
    (note,) = read.notes
    assert "1 KV scale;" in note


def test_plain_fp8_weights_without_scales_say_nothing(tmp_path: Path) -> None:
    read = read_checkpoint(write(tmp_path, {"quant_method": "fp8"}, tensors={}))
    assert (read.scheme, dict(read.scales), read.notes) == (None, {}, ())


def test_the_one_word_static_is_fp8_with_promised_scales(tmp_path: Path) -> None:
    wish = scheme_of(tmp_path, {"quant_method": "fp8", "kv_cache_scheme": "static"})
    where = "config.json: quantization_config.kv_cache_scheme"
    assert wish == KVWish(FP8, FP8, where, ScalePromise.STATIC)


@pytest.mark.parametrize("scheme", ["dynamic", {"num_bits": 8, "type": "float"}, 8])
def test_other_words_are_unreadable(tmp_path: Path, scheme: Any) -> None:
    config = {"quant_method": "fp8", "kv_cache_scheme": scheme}
    assert isinstance(scheme_of(tmp_path, config), UnreadableWish)


# -- quantisers unknown here ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gptq", "awq", "mxfp4", "bitsandbytes", "torchao", None, 3])
def test_a_quantiser_of_weights_makes_no_wish(tmp_path: Path, method: Any) -> None:
    assert scheme_of(tmp_path, {"quant_method": method, "bits": 4}) is None


def test_an_unknown_quantiser_that_speaks_of_kv_is_not_ignored(tmp_path: Path) -> None:
    config = {"quant_method": "novelquant", "kv_cache_dtype": "fp3"}
    wish = scheme_of(tmp_path, config)
    assert isinstance(wish, UnreadableWish)
    assert "novelquant" in wish.why
    assert "fp3" in wish.asked
    assert wish.where == "config.json: quantization_config.kv_cache_dtype"
