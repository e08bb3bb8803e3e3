"""ModelOpt in both files: algorithms, objects and bare strings, per-layer maps, cast recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvant.kv.checkpoint.facts import KVWish, ScalePromise, UnreadableWish
from kvant.kv.checkpoint.lookup import wish_for
from kvant.kv.dtype import KVDtype
from tests.kv.checkpoint.build import (
    MODELOPT_FP8_SCHEME,
    followed,
    layer,
    modelopt_config,
    modelopt_file,
    scales,
    write,
)
from tests.kv.checkpoint.stored import read_checkpoint

FP8, NVFP4 = KVDtype.FP8_E4M3, KVDtype.NVFP4
FP8_ENTRY, NVFP4_ENTRY = {"quant_algo": "FP8"}, {"quant_algo": "NVFP4"}


def layer_map(*entries: Any, prefix: str = "model.layers.{}.self_attn") -> dict[str, Any]:
    return {
        "kv_cache_quantized_layers": {prefix.format(i): e for i, e in enumerate(entries) if e},
        "kv_cache_schema_version": 1,
    }


def read_both_ways(tmp_path: Path, algo: Any, scheme: Any) -> list[Any]:
    """The same statement in each file alone, and in both."""
    made = [
        write(tmp_path / "hf", hf_quant=modelopt_file(algo)),
        write(tmp_path / "config", modelopt_config(scheme)),
        write(tmp_path / "both", modelopt_config(scheme), hf_quant=modelopt_file(algo)),
    ]
    return [read_checkpoint(directory).scheme for directory in made]


@pytest.mark.parametrize(
    ("algo", "scheme", "k", "v"),
    [
        ("FP8", MODELOPT_FP8_SCHEME, FP8, FP8),
        ("FP8", "FP8", FP8, FP8),
        ("fp8", "fp8", FP8, FP8),
        ("NVFP4", "NVFP4", NVFP4, NVFP4),
        ("NVFP4", {"num_bits": 4, "type": "float", "group_size": 16}, NVFP4, NVFP4),
        ("FP8_K_NVFP4_V", "FP8_K_NVFP4_V", FP8, NVFP4),
    ],
)
def test_each_file_is_read_alone_and_together_with_the_other(
    tmp_path: Path, algo: str, scheme: Any, k: KVDtype, v: KVDtype
) -> None:
    for wish in read_both_ways(tmp_path, algo, scheme):
        assert isinstance(wish, KVWish)
        assert (wish.k, wish.v) == (k, v)


def test_a_wish_names_its_file_and_key(tmp_path: Path) -> None:
    hf, config, _ = read_both_ways(tmp_path, "NVFP4", "NVFP4")
    assert hf.where == "hf_quant_config.json: quantization.kv_cache_quant_algo"
    assert config.where == "config.json: quantization_config.kv_cache_scheme"


@pytest.mark.parametrize("algo", [None, "none", "NONE"])
def test_null_is_no_wish(tmp_path: Path, algo: Any) -> None:
    assert read_both_ways(tmp_path, algo, algo) == [None] * 3


@pytest.mark.case("A13")
@pytest.mark.parametrize(
    ("algo", "scheme", "nearest"),
    [
        ("INT8", "INT8", KVDtype.INT8_PER_TOKEN_HEAD),
        ("INT8", {"num_bits": 8, "type": "int"}, KVDtype.INT8_PER_TOKEN_HEAD),
        ("NVFP4_AFFINE", "NVFP4_AFFINE", NVFP4),
        ("NVFP4_ROTATE", "nvfp4_rotate", NVFP4),
        ("FP8_AFFINE", "FP8_AFFINE", KVDtype.FP8_PER_TOKEN_HEAD),
        ("SOMETHING_NEW", "SOMETHING_NEW", None),
    ],
)
def test_an_algorithm_without_a_format_is_unreadable_and_lists_the_supported(
    tmp_path: Path, algo: str, scheme: Any, nearest: KVDtype | None
) -> None:
    for wish in read_both_ways(tmp_path, algo, scheme):
        assert isinstance(wish, UnreadableWish)
        assert wish.asked == algo
        assert wish.nearest is nearest
        for supported in ("FP8", "NVFP4", "FP8_K_NVFP4_V", "MIXED_PRECISION"):
            assert supported in wish.why


@pytest.mark.case("A17")
@pytest.mark.parametrize(
    "scheme",
    [
        {"num_bits": 8, "type": "float", "dynamic": True},
        {"num_bits": 8, "type": "float", "symmetric": False},
        {"num_bits": 4, "type": "float"},
        {"num_bits": 4, "type": "int"},
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "surprise": 1},
        "static",
        8,
        [],
    ],
)
def test_other_objects_are_never_taken_for_fp8_or_nvfp4(tmp_path: Path, scheme: Any) -> None:
    read = read_checkpoint(write(tmp_path, modelopt_config(scheme)))
    assert isinstance(read.scheme, UnreadableWish)


@pytest.mark.case("A13")
def test_mixed_precision_without_a_map_is_unreadable(tmp_path: Path) -> None:
    for wish in read_both_ways(tmp_path, "MIXED_PRECISION", "MIXED_PRECISION"):
        assert isinstance(wish, UnreadableWish)
        assert wish.why == "it needs kv_cache_quantized_layers, and there is none"


@pytest.mark.parametrize(
    ("scheme", "asked"),
    [
        ({"num_bits": 4, "type": "int"}, "4-bit int per tensor, static"),
        ({"num_bits": 8, "symmetric": False}, "8-bit int per tensor, static, asymmetric"),
        ({"num_bits": 8, "group_size": 16}, "8-bit int per group of 16, static"),
    ],
)
def test_an_object_is_called_by_an_algorithms_name_only_if_it_is_that(
    tmp_path: Path, scheme: Any, asked: str
) -> None:
    wish = read_checkpoint(write(tmp_path, modelopt_config(scheme))).scheme
    assert isinstance(wish, UnreadableWish)
    assert wish.asked == asked


@pytest.mark.case("A19")
def test_two_keys_of_one_file_that_disagree_are_unreadable(tmp_path: Path) -> None:
    wish = read_checkpoint(
        write(tmp_path, modelopt_config("NVFP4", kv_cache_quant_algo="FP8"))
    ).scheme
    assert isinstance(wish, UnreadableWish)
    assert wish.asked == "FP8 (kv_cache_quant_algo) against NVFP4 (kv_cache_scheme)"


# -- scales or none: calibrated exports and cast recipes -----------------------------------------


@pytest.mark.case("A10")
@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "FP8_K_NVFP4_V"])
def test_no_scale_tensors_at_all_is_a_cast_recipe_without_notes(tmp_path: Path, algo: str) -> None:
    read = read_checkpoint(write(tmp_path, hf_quant=modelopt_file(algo), tensors={}))
    assert followed(read, layer(0)).promise is ScalePromise.CAST
    assert read.checked
    assert read.notes == ()


def test_one_scale_tensor_shows_a_calibrated_export(tmp_path: Path) -> None:
    tensors = scales(("k_proj.k_scale", "v_proj.v_scale"), num_layers=1)
    read = read_checkpoint(write(tmp_path, hf_quant=modelopt_file("FP8"), tensors=tensors))
    assert followed(read, layer(1)).promise is ScalePromise.STATIC


def test_in_a_map_each_algorithm_is_calibrated_or_cast_by_itself(tmp_path: Path) -> None:
    """A search may mix calibrated fp8 layers with nvfp4 layers that are merely cast."""
    body = modelopt_file("MIXED_PRECISION", **layer_map(FP8_ENTRY, NVFP4_ENTRY, FP8_ENTRY))
    tensors = scales(("k_proj.k_scale", "v_proj.v_scale"), num_layers=1)
    read = read_checkpoint(write(tmp_path, hf_quant=body, tensors=tensors))
    promises = [followed(read, layer(i)).promise for i in range(3)]
    assert promises == [ScalePromise.STATIC, ScalePromise.CAST, ScalePromise.STATIC]


# -- per-layer maps ------------------------------------------------------------------------------


@pytest.mark.case("A14")
@pytest.mark.parametrize("place", ["hf", "config"])
def test_a_map_decides_layer_by_layer_and_leaves_the_rest_alone(tmp_path: Path, place: str) -> None:
    stated = layer_map(FP8_ENTRY, None, NVFP4_ENTRY, {"quant_algo": "FP8_K_NVFP4_V"})
    if place == "hf":
        write(tmp_path, hf_quant=modelopt_file("MIXED_PRECISION", **stated))
    else:
        # config.json keeps the algorithm's name beside the map, without a scheme.
        converted = {"quant_method": "modelopt", "kv_cache_quant_algo": "MIXED_PRECISION", **stated}
        write(tmp_path, converted)
    read = read_checkpoint(tmp_path)
    found = [wish_for(read, layer(i)) for i in range(5)]
    assert [w and isinstance(w, KVWish) and (w.k, w.v) for w in found] == [
        (FP8, FP8), None, (NVFP4, NVFP4), (FP8, NVFP4), None,
    ]  # fmt: skip
    assert found[2] is not None
    assert "kv_cache_quantized_layers['model.layers.2.self_attn']" in found[2].where


def test_a_uniform_map_with_its_scheme_is_legal_and_still_leaves_layers_out(tmp_path: Path) -> None:
    stated = layer_map(FP8_ENTRY)
    write(
        tmp_path,
        modelopt_config(MODELOPT_FP8_SCHEME, **stated),
        hf_quant=modelopt_file("FP8", **stated),
    )
    read = read_checkpoint(tmp_path)
    assert followed(read, layer(0)).k is FP8
    assert wish_for(read, layer(1)) is None


def test_scales_under_a_map_are_asked_for_and_need_no_hint(tmp_path: Path) -> None:
    body = modelopt_file("FP8", **layer_map(FP8_ENTRY))
    assert read_checkpoint(write(tmp_path, hf_quant=body, tensors=scales())).notes == ()


def test_a_side_file_that_does_not_mention_kv_says_nothing(tmp_path: Path) -> None:
    body = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    assert read_checkpoint(write(tmp_path, hf_quant=body)).scheme is None


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_another_schema_version_is_unreadable_as_a_whole(tmp_path: Path, version: Any) -> None:
    body = modelopt_file("FP8", **{**layer_map(FP8_ENTRY), "kv_cache_schema_version": version})
    read = read_checkpoint(write(tmp_path, hf_quant=body))
    assert isinstance(read.scheme, UnreadableWish)
    assert "kv_cache_schema_version" in read.scheme.why
    assert wish_for(read, layer(0)) is read.scheme


@pytest.mark.parametrize("content", [{}, [], "all", ["model.layers.0.self_attn"]])
def test_a_map_that_is_no_map_is_unreadable(tmp_path: Path, content: Any) -> None:
    body = modelopt_file("FP8", kv_cache_quantized_layers=content, kv_cache_schema_version=1)
    assert isinstance(read_checkpoint(write(tmp_path, hf_quant=body)).scheme, UnreadableWish)


@pytest.mark.case("A13")
@pytest.mark.parametrize(
    "entry",
    [
        {"quant_algo": "INT8"},
        {"quant_algo": "MIXED_PRECISION"},
        {"quant_algo": "NVFP4", "group_size": 32},
        {"quant_algo": "FP8", "surprise": True},
        {"quant_algo": 8},
        {},
        "FP8",
        3,
    ],
)
def test_one_unreadable_layer_leaves_the_others_readable(tmp_path: Path, entry: Any) -> None:
    stated = layer_map(FP8_ENTRY)
    stated["kv_cache_quantized_layers"]["model.layers.1.self_attn"] = entry
    read = read_checkpoint(write(tmp_path, hf_quant=modelopt_file("MIXED_PRECISION", **stated)))
    assert isinstance(wish_for(read, layer(1)), UnreadableWish)
    assert followed(read, layer(0)).k is FP8


def test_null_in_a_map_is_the_model_dtype_and_group_size_16_is_nvfp4s_own(tmp_path: Path) -> None:
    stated = layer_map({"quant_algo": None}, {"quant_algo": "NVFP4", "group_size": 16})
    read = read_checkpoint(write(tmp_path, hf_quant=modelopt_file("NVFP4", **stated)))
    none, nvfp4 = followed(read, layer(0)), followed(read, layer(1))
    assert (none.k, none.v) == (None, None)
    assert (nvfp4.k, nvfp4.v) == (NVFP4, NVFP4)


@pytest.mark.case("A19")
def test_a_map_against_its_own_algorithm_is_unreadable_and_names_both(tmp_path: Path) -> None:
    body = modelopt_file("FP8", **layer_map(FP8_ENTRY, NVFP4_ENTRY))
    scheme = read_checkpoint(write(tmp_path, hf_quant=body)).scheme
    assert isinstance(scheme, UnreadableWish)
    assert "disagree" in scheme.why
    assert "FP8" in scheme.asked
    assert "NVFP4" in scheme.asked


# -- two files -----------------------------------------------------------------------------------


@pytest.mark.case("A19")
@pytest.mark.parametrize(
    ("algo", "scheme"),
    [
        ("FP8", "NVFP4"),
        ("NVFP4", MODELOPT_FP8_SCHEME),
        (None, "FP8"),
        ("FP8", None),
        ("INT8", "FP8"),
    ],
)
def test_files_that_disagree_are_unreadable_and_both_values_are_named(
    tmp_path: Path, algo: Any, scheme: Any
) -> None:
    read = read_checkpoint(write(tmp_path, modelopt_config(scheme), hf_quant=modelopt_file(algo)))
    assert isinstance(read.scheme, UnreadableWish)
    assert "disagree" in read.scheme.why
    shown = {None: "none", "FP8": "FP8", "NVFP4": "NVFP4", "INT8": "INT8"}
    assert f"kv_cache_quant_algo says {shown[algo]}" in read.scheme.why
    said = "FP8" if scheme is MODELOPT_FP8_SCHEME else shown[scheme]
    assert f"kv_cache_scheme says {said}" in read.scheme.why


@pytest.mark.case("A19")
def test_maps_that_disagree_are_unreadable(tmp_path: Path) -> None:
    one, other = layer_map(FP8_ENTRY, NVFP4_ENTRY), layer_map(NVFP4_ENTRY, FP8_ENTRY)
    write(
        tmp_path,
        {"quant_method": "modelopt", "kv_cache_quant_algo": "MIXED_PRECISION", **one},
        hf_quant=modelopt_file("MIXED_PRECISION", **other),
    )
    assert isinstance(read_checkpoint(tmp_path).scheme, UnreadableWish)


@pytest.mark.case("A19")
def test_a_config_that_does_not_mention_kv_contradicts_no_other_file(tmp_path: Path) -> None:
    """Old exports speak of KV in hf_quant_config.json alone."""
    silent = {"quant_method": "modelopt", "quant_algo": "FP8"}
    read = read_checkpoint(write(tmp_path, silent, hf_quant=modelopt_file("FP8")))
    assert followed(read, layer(0)).where.startswith("hf_quant_config.json")


@pytest.mark.parametrize("signed", [{"quant_method": "modelopt"}, {}])
def test_the_unconverted_form_inside_config_json_is_read(tmp_path: Path, signed: Any) -> None:
    whole = {**modelopt_file("FP8"), **signed}
    wish = followed(read_checkpoint(write(tmp_path, whole)), layer(0))
    assert wish.where == "config.json: quantization_config.quantization.kv_cache_quant_algo"


@pytest.mark.parametrize("content", [{}, {"quantization": None}, {"quantization": "FP8"}])
def test_a_side_file_without_its_section_is_unreadable(tmp_path: Path, content: Any) -> None:
    assert isinstance(read_checkpoint(write(tmp_path, hf_quant=content)).scheme, UnreadableWish)
